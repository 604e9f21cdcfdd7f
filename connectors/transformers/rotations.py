"""Fixes rotary embeddings that depend on the length of the text, or refuses them.

LongRoPE has one set of factors for texts up to its original training length and another for longer
texts. Dynamic NTK has different factors for each length. The same tokens then get different keys,
depending on the length of the pass, so a block must not be served to a text of another length.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from inspect import BoundArguments, signature
from typing import Any, Final, NamedTuple

import torch

from kvladder.connectors.digests import digest
from kvladder.connectors.transformers.layers import cache_after
from kvladder.errors import LayoutError

FAR: Final = 1 << 22
"""Length in tokens that exceeds any text that a model is made for."""
PROBED: Final = 16
"""Number of positions that an embedding is tested with."""
_POSITIONS: Final = "position_ids"


class Rotary(NamedTuple):
    """A rotary embedding of a model, and its calls in a pass: one for each kind of layer."""

    name: str
    module: torch.nn.Module
    calls: list[BoundArguments]


class Rotations:
    """Fixes the rotations of a model to those of a text of ``context`` tokens.

    Parameters
    ----------
    model:
        The model. It is run on one token, and changed only within ``held``.
    context:
        Tokens of the longest text.

    Raises
    ------
    LayoutError
        A rotation depends on the length of the text and cannot be fixed.
    """

    def __init__(self, model: Any, *, context: int) -> None:
        self.fields: Mapping[str, str] = {}
        """Layout fields that identify the fixed rotations; empty if none must be fixed."""
        self._held: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        state = sha256(b"kvladder rotations 1")
        for one in dependent(model):
            fixed = _fixed(one, context)
            answers = [part for call in one.calls for part in _ask(fixed, call, range(PROBED))]
            if not _alike(fixed, one.calls, context):
                hint = "expected a shorter context, within which the rotation stays the same"
                raise LayoutError(
                    f"{_depends(one)}, within {context} tokens", path="context", hint=hint
                )
            self._held.append((one.module, fixed))
            state.update(one.name.encode() + b"".join(map(digest, answers)))
        if self._held:
            self.fields = {"rotations": state.hexdigest()}

    @contextmanager
    def held(self) -> Generator[None]:
        """Use the fixed rotations in passes within this context."""
        before = [vars(module).get("forward") for module, _ in self._held]
        for module, fixed in self._held:
            module.forward = fixed.forward
        try:
            yield
        finally:
            for (module, _), own in zip(self._held, before, strict=True):
                if own is None:
                    del module.forward
                else:
                    module.forward = own


def require_fixed(model: Any) -> None:
    """Raise LayoutError if a rotation of the model depends on the length of the text."""
    for one in dependent(model):
        hint = "use PooledModel, which uses the rotation of its context for all texts"
        raise LayoutError(_depends(one), hint=hint)


def _depends(one: Rotary) -> str:
    kind = getattr(one.module, "rope_type", type(one.module).__name__)
    return f"the rotation of {one.name} ({kind}) depends on the length of the text"


def dependent(model: Any) -> list[Rotary]:
    """Return the rotary embeddings that rotate the same token differently in a longer text.

    Each is called for the same positions with and without a far position behind them. An embedding
    with a table that is too short for that counts as independent here.
    """
    return [one for one in _embeddings(model) if not _alike(_aside(one.module), one.calls, FAR)]


def _embeddings(model: Any) -> list[Rotary]:
    """Return the modules without parameters that receive positions in a pass, with their calls."""
    found: dict[int, Rotary] = {}

    def note(module: torch.nn.Module, given: Any, named: Any) -> None:
        found[id(module)].calls.append(signature(module.forward).bind(*given, **named))

    hooks: list[Any] = []
    try:
        for name, module in model.named_modules():
            if _POSITIONS in signature(module.forward).parameters and not [*module.parameters()]:
                found[id(module)] = Rotary(name, module, [])
                hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        cache_after(model, 1)
    finally:
        for hook in hooks:
            hook.remove()
    return [one for one in found.values() if one.calls]


def _aside(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy on the CPU: there a position outside a table only raises an error."""
    return deepcopy(module).cpu()


def _fixed(one: Rotary, context: int) -> torch.nn.Module:
    """Return a copy of an embedding that keeps the rotation of a text of ``context`` tokens."""
    fixed = deepcopy(one.module)
    for call in one.calls:
        _ask(fixed, call, [context - 1])
    kind: Any = getattr(fixed, "rope_type", None)
    if kind is not None:  # transformers recomputes the factors only for certain types
        held = dict.fromkeys(kind, "held") if isinstance(kind, Mapping) else "held"
        vars(fixed)["rope_type"] = held
    return fixed


def _alike(module: torch.nn.Module, calls: Sequence[BoundArguments], context: int) -> bool:
    """Return whether position ``context - 1`` leaves the rotation of the first positions alike."""
    near = range(min(PROBED, context))
    far = [*near[:-1], context - 1]
    for call in calls:
        try:
            answers = [_ask(module, call, asked) for asked in (near, far, near)]
        except (IndexError, RuntimeError):  # its table is shorter, so texts are never that long
            continue
        for parts in zip(*answers, strict=True):
            first, *others = (part[..., : len(near) - 1, :] for part in parts)
            if not all(torch.equal(first, other) for other in others):
                return False
    return True


@torch.inference_mode()
def _ask(
    module: torch.nn.Module, call: BoundArguments, positions: Sequence[int]
) -> list[torch.Tensor]:
    """Call an embedding as its model did, but with these positions; return its outputs."""
    device = next((one.device for one in module.buffers()), torch.device("cpu"))
    given = BoundArguments(call.signature, call.arguments.copy())
    for name, value in given.arguments.items():
        if isinstance(value, torch.Tensor):
            part = value.float() if value.is_floating_point() else value
            given.arguments[name] = part.to(device)
    before = given.arguments[_POSITIONS]
    asked = torch.tensor([*positions], device=device)
    given.arguments[_POSITIONS] = asked.expand(*before.shape[:-1], len(asked))
    found = module(*given.args, **given.kwargs)
    return [*found] if isinstance(found, tuple | list) else [found]
