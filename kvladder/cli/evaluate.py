"""``kvladder eval``: measures how codecs, or settings of pools, change a model's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from yaml import YAMLError

from kvladder.cli.output import Failed, Result
from kvladder.config import registry
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Kind
from kvladder.schema import is_list, is_mapping, parse_yaml
from kvladder.units import Size

if TYPE_CHECKING:  # these need torch and transformers
    from kvladder.connectors.transformers.loss import PoolsEvaluation
    from kvladder.planning.loss import Evaluation, Loss

EXIT_TOO_MUCH: Final = 1
NEEDS: Final = "install kvladder[transformers]"


def eval_(
    *,
    model: Path,
    prompts: Path,
    codec: str | None = None,
    gpu: str | None = None,
    kinds: str | None = None,
    tokens: int = 2048,
    block_tokens: int = 16,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
) -> Result:
    """Measure how codecs, or settings of pools, change a model's answers.

    Runs the second half of each prompt twice: over the original keys and values of the first half,
    and over those that the codecs return or the pools keep. Exits with 1 if the loss is above
    an allowed limit, with 2 if an argument or a file is wrong. Needs transformers.

    Parameters
    ----------
    model:
        run the causal language model of transformers in this folder
    prompts:
        read prompts from this file, one per line: text, or token ids as [1, 2, ...]
    codec:
        measure these codecs, written as in a stack: fp8, {name: zstd, level: 3}, or a list of them
    gpu:
        measure these settings of pools instead of codecs, written as a stack's gpu, with dtype and
        windows only: {dtype: fp8, windows: [4096, 0]}
    kinds:
        with --codec, encode only these kinds of layers, as in allow_lossy, such as full,window
        (default: all)
    tokens:
        use at most N tokens per prompt (default %(default)s)
    block_tokens:
        use N tokens per block (default %(default)s)
    max_divergence:
        exit with 1 if the mean Kullback-Leibler divergence is above N nats per token
    min_agreement:
        exit with 1 if the most likely next token is the same after less than this share of tokens,
        0 to 1
    """
    chosen = _chosen(codec, gpu, kinds)
    for flag, count, least in (
        ("block-tokens", block_tokens, 1),
        ("tokens", tokens, 2 * block_tokens),
    ):
        if count < least:
            raise ConfigError(str(count), path=f"--{flag}", hint=f"expected {least} or more")
    loaded = _loaded(model)
    with ExitStack() as opened:
        run = chosen.open(loaded, tokens, block_tokens, opened)
        counted = 0
        for line, prompt in _prompts(prompts, model):
            _check(prompt, loaded, f"{prompts}:{line}", least=run.shortest)
            run.run(prompt[:tokens])
            counted += 1
    if not counted:
        raise ConfigError(f"{prompts} is empty", path="--prompts", hint="write one prompt per line")
    text = f"{model}: {chosen.report(run)}; {counted} prompts, {_costs(run.loss)}"
    result = Result(text, {"model": str(model), "prompts": counted, **_data(run.loss)})
    exceeded = list(_exceeded(run.loss, max_divergence, min_agreement))
    if exceeded:
        raise Failed("; ".join(exceeded), EXIT_TOO_MUCH, result)
    return result


def _chosen(codec: str | None, gpu: str | None, kinds: str | None) -> _Codecs | _Pools:
    """Return the evaluation that the arguments choose: codecs or settings of pools."""
    if codec is not None and gpu is None:
        return _Codecs(_kinds(kinds), kinds, _level(codec))
    if gpu is None or codec is not None:
        what = "missing" if gpu is None else "given with --gpu"
        hint = "expected either --codec or --gpu: each is measured alone"
        raise ConfigError(what, path="--codec", hint=hint)
    if kinds is not None:
        raise ConfigError(kinds, path="--kinds", hint="leave it out: pools hold all layers")
    return _Pools(_settings(gpu))


class _Codecs(NamedTuple):
    """An evaluation of codecs."""

    kinds: Sequence[str]
    said: str | None
    level: LevelConfig

    def open(self, model: Any, tokens: int, block_tokens: int, opened: ExitStack) -> Evaluation:
        from kvladder.planning.loss import Evaluation

        del tokens, opened
        codecs = self.level.make_codecs
        return Evaluation(model, codecs, kinds=self.kinds, block_tokens=block_tokens)

    def report(self, run: Any) -> str:
        """Return a line about what was evaluated; raise ConfigError if no layer was."""
        if not run.changed:
            there = ", ".join(sorted(run.spared))
            chosen = (
                "codecs encode no layer" if self.said is None else f"{self.said!r} selects none"
            )
            flag = "--codec" if self.said is None else "--kinds"
            raise ConfigError(f"{chosen}: the model's layers are {there}", path=flag)
        return _report(run, self.level)


class _Pools(NamedTuple):
    """An evaluation of settings of pools."""

    gpu: Mapping[str, Any]

    def open(
        self, model: Any, tokens: int, block_tokens: int, opened: ExitStack
    ) -> PoolsEvaluation:
        from kvladder.connectors.transformers.loss import PoolsEvaluation

        run = PoolsEvaluation(model, self.gpu, context=tokens, block_tokens=block_tokens)
        return opened.enter_context(run)

    def report(self, run: Any) -> str:
        """Return a line about what was evaluated."""
        del run
        return "pools with " + ", ".join(f"{name} {value}" for name, value in self.gpu.items())


def _settings(said: str) -> Mapping[str, Any]:
    """Return the settings of ``--gpu``; only those that change answers are accepted."""
    hint = "expected {dtype: ..., windows: [...]}, or one of them"
    found = _yaml(said, "--gpu", hint)
    if not is_mapping(found) or not found or not {*found} <= {"dtype", "windows"}:
        raise ConfigError(repr(said), path="--gpu", hint=hint)
    load_config({"gpu": found}, env={})
    return found


def _report(run: Evaluation, level: LevelConfig) -> str:
    """Return which codecs encoded which kinds of layers."""
    names = ", ".join(one.name for one in level.codecs)
    spared = f", not on {', '.join(sorted(run.spared))}" if run.spared else ""
    return f"{names} on layers of kind {', '.join(sorted(run.changed))}{spared}"


def _costs(loss: Loss) -> str:
    plain, coded = loss.perplexity
    ratio = loss.stored_bytes / loss.plain_bytes
    return "\n".join(
        (
            f"{loss.tokens} tokens compared",
            f"bytes          {Size(loss.plain_bytes)} -> {Size(loss.stored_bytes)} ({ratio:.3f})",
            f"divergence     {loss.mean:.3g} nats per token, {loss.most:.3g} at most",
            f"perplexity     {plain:.6g} -> {coded:.6g} ({coded / plain - 1:+.2%})",
            f"agreement      {loss.agreement:.2%} of tokens have the same most likely next token",
        )
    )


def _data(loss: Loss) -> dict[str, Any]:
    """Return the loss as plain data."""
    plain, coded = loss.perplexity
    return {
        "tokens": loss.tokens,
        "plain_bytes": loss.plain_bytes,
        "stored_bytes": loss.stored_bytes,
        "divergence": {"mean": loss.mean, "most": loss.most},
        "perplexity": {"plain": plain, "coded": coded},
        "agreement": loss.agreement,
    }


def _exceeded(loss: Loss, divergence: float | None, agreement: float | None) -> Iterator[str]:
    """Yield a sentence for each exceeded limit. A NaN exceeds every limit."""
    if divergence is not None and not loss.mean <= divergence:
        yield f"divergence {loss.mean:.3g}: expected at most {divergence:g}"
    if agreement is not None and not loss.agreement >= agreement:
        yield f"agreement {loss.agreement:.4g}: expected at least {agreement:g}"


def _kinds(said: str | None) -> Sequence[str]:
    known = get_args(Kind)
    wanted = known if said is None else [one.strip() for one in said.split(",")]
    for one in wanted:
        if one not in known:
            raise ConfigError(repr(one), path="--kinds", hint=f"choose from: {', '.join(known)}")
    return wanted


def _level(said: str) -> LevelConfig:
    """Return a level with these codecs. Lossy ones are allowed: their loss is measured here."""
    found = _yaml(said, "--codec", "expected a name, {name: ...} or a list of them")
    entries: list[Any] = list(found) if is_list(found) else [found]
    for at, one in enumerate(entries):
        entry = dict(one) if is_mapping(one) else {"name": one}
        with suppress(ConfigError):  # load_config reports it below
            if registry.load("codecs", str(entry.get("name"))).lossy:
                entry.setdefault("allow_lossy", list(get_args(Kind)))
        entries[at] = entry
    tier = {"type": "memory", "capacity": "1 MiB", "codecs": entries}
    source = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, tier]}
    try:
        (level,) = load_config(source, env={}).levels
    except ConfigError as error:
        raise ConfigError(error.message, path="--codec", hint=error.hint) from error
    return level


def _yaml(said: str, path: str, hint: str) -> object:
    try:
        return parse_yaml(said)
    except YAMLError as error:
        raise ConfigError(repr(said), path=path, hint=hint) from error


def _loaded(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"needs torch and transformers: {error}", hint=NEEDS) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model: Any = auto.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError) as error:
        what = f"{folder}: {str(error).partition(chr(10))[0]}"
        hint = "expected a folder with a causal language model of transformers"
        raise ConfigError(what, path="--model", hint=hint) from error
    return model.eval()


def _prompts(file: Path, model: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield the number and the tokens of each line that is not empty."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}", path="--prompts") from error
    tokenizer: Any = None
    for number, line in enumerate(lines, 1):
        found: Any = line
        with suppress(json.JSONDecodeError):
            found = json.loads(line)
        if is_list(found) and all(type(one) is int for one in found):
            yield number, list(found)
        elif line.strip():
            tokenizer = tokenizer or _tokenizer(model, f"{file}:{number}")
            yield number, list(tokenizer.encode(found if isinstance(found, str) else line))


def _tokenizer(model: Path, where: str) -> Any:
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    try:
        return auto.from_pretrained(model, local_files_only=True)
    except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
        what = f"{where} is text, but {model} has no usable tokenizer"
        raise ConfigError(what, path="--prompts", hint="give token ids: [1, 2, ...]") from error


def _check(prompt: Sequence[int], model: Any, where: str, *, least: int) -> None:
    """Raise ConfigError unless a prompt can be run."""
    if len(prompt) < least:
        hint = f"expected two blocks, {least} tokens, or more; or use a smaller --block-tokens"
        raise ConfigError(f"{where}: {len(prompt)} tokens", path="--prompts", hint=hint)
    size = int(model.get_input_embeddings().weight.shape[0])
    wrong = next((one for one in prompt if not 0 <= one < size), None)
    if wrong is not None:
        hint = f"expected 0 to {size - 1}, the ids that the model knows"
        raise ConfigError(f"{where}: token {wrong}", path="--prompts", hint=hint)
