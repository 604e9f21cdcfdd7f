"""Keys: equal if and only if everything that they bind is equal."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvladder.errors import ConfigError
from kvladder.keys import KEY_BYTES, BlockKey, KeyScheme, namespace, salt_digest

TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=12)
NAMES = st.text(st.sampled_from("ab\0="), max_size=3)


def scheme(block_tokens: int = 4, **fields: str) -> KeyScheme:
    return KeyScheme(namespace(fields), block_tokens=block_tokens)


@dataclass(frozen=True)
class Prompt:
    """All that one block's key depends on."""

    fields: tuple[tuple[str, str], ...]
    deployment: str
    block_tokens: int
    salt: str
    lora: str
    tokens: tuple[int, ...]
    extra: tuple[tuple[int, bytes], ...]

    def keys(self) -> list[BlockKey]:
        space = namespace(dict(self.fields), salt=self.deployment)
        keys = KeyScheme(space, block_tokens=self.block_tokens)
        root = keys.root(salt=self.salt, lora=self.lora)
        return keys.chain(self.tokens, parent=root, extra=self.extra)

    def prefix(self, blocks: int) -> tuple[object, ...]:
        """Return all that the key of the block at this position depends on, and nothing else."""
        end = blocks * self.block_tokens
        extra = tuple(sorted((at, content) for at, content in self.extra if at < end))
        names = (frozenset(self.fields), self.deployment, self.block_tokens, self.salt, self.lora)
        return (*names, self.tokens[:end], extra)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(TOKENS)
    at = st.integers(0, max(0, len(tokens) - 1))
    extra = draw(st.lists(st.tuples(at, st.binary(max_size=2)), max_size=2)) if tokens else []
    return Prompt(
        fields=tuple(draw(st.dictionaries(NAMES, NAMES, max_size=2)).items()),
        deployment=draw(NAMES),
        block_tokens=draw(st.integers(1, 4)),
        salt=draw(NAMES),
        lora=draw(NAMES),
        tokens=tuple(tokens),
        extra=tuple(extra),
    )


@given(left=prompts(), right=prompts())
def test_keys_are_equal_if_and_only_if_all_their_inputs_are(left: Prompt, right: Prompt) -> None:
    for i, one in enumerate(left.keys(), 1):
        for j, other in enumerate(right.keys(), 1):
            assert (one == other) == (left.prefix(i) == right.prefix(j))


@given(prompt=prompts(), data=st.data())
def test_one_change_changes_every_key_after_it_and_none_before(
    prompt: Prompt, data: st.DataObject
) -> None:
    if not prompt.tokens:
        return
    at = data.draw(st.integers(0, len(prompt.tokens) - 1))
    tokens = list(prompt.tokens)
    tokens[at] ^= 1
    changed = Prompt(**{**prompt.__dict__, "tokens": tuple(tokens)})
    same = at // prompt.block_tokens
    before, after = prompt.keys(), changed.keys()
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@given(tokens=TOKENS, split=st.integers(0, 3))
def test_a_chain_continues_from_the_end_of_another(tokens: list[int], split: int) -> None:
    keys = scheme(block_tokens=2)
    whole = keys.chain(tokens)
    head = keys.chain(tokens[: 2 * split])
    parent = head[-1] if head else None
    assert head + keys.chain(tokens[2 * len(head) :], parent=parent) == whole


def test_keys_are_long_digests_of_whole_blocks() -> None:
    keys = scheme().chain(range(11))
    assert [len(key) for key in keys] == [KEY_BYTES, KEY_BYTES]
    assert 8 * KEY_BYTES >= 256
    assert scheme().chain(range(3)) == []


def test_the_chain_matches_the_documentation() -> None:
    """Computed independently: other programs may have to make the same keys."""
    keys = scheme()
    first = hashlib.sha256(keys.root() + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert keys.chain([1, 2, 3, 2**32 - 1, 5, 6, 7, 8]) == [first, second]


def test_names_match_those_of_earlier_versions() -> None:
    """Written down: other names would make every cache that exists cold."""
    space = namespace({"model": "m", "dtype": "bfloat16"}, salt="deployment")
    assert space.hex()[:32] == "fed3d2c0f73e874296e1a54bbc90dd1c"
    keys = KeyScheme(space, block_tokens=2)
    root = keys.root(salt="tenant", lora="adapter")
    chain = keys.chain([1, 2, 3, 4], parent=root, extra=[(3, b"image")])
    named = [root, *chain, keys.tail([5], parent=root), salt_digest(space, "tenant")]
    assert [name.hex()[:16] for name in named] == [
        "4a7d059968862985",
        "8db8e34e20a1a4ac",
        "78d9fd1b9b96cc53",
        "368f8386d4ecef07",
        "6570b28bc8ee84f8",
    ]


def test_q7_flipping_a_token_leaves_the_blocks_before_it() -> None:
    """Three blocks of 16: hit 3; token 19 flipped: 1; token 0: 0; other LoRA or salt: 0."""
    keys = scheme(block_tokens=16)
    tokens = list(range(48))
    stored = set(keys.chain(tokens))

    def hits(changed: list[int], **names: str) -> int:
        found = keys.chain(changed, parent=keys.root(**names))
        return next((n for n, key in enumerate(found) if key not in stored), len(found))

    assert hits(tokens) == 3
    assert hits([*tokens[:19], 99, *tokens[20:]]) == 1
    assert hits([99, *tokens[1:]]) == 0
    assert hits(tokens, lora="other") == 0
    assert hits(tokens, salt="other") == 0


@given(salts=st.lists(st.text(min_size=1), min_size=2, max_size=20, unique=True))
@example(salts=["\0", " ", "\ud800", "a\0", "ключ", "🔑", "a" * 99, "a" * 100])
def test_any_text_is_a_salt_of_its_own(salts: list[str]) -> None:
    keys, names = scheme(), ["", *salts]
    chains = [keys.chain(range(8), parent=keys.root(salt=salt)) for salt in names]
    assert len({key for chain in chains for key in chain}) == len(chains) * len(chains[0])
    beside = [salt_digest(keys.namespace, salt) for salt in names]
    assert len(set(beside)) == len(names)
    assert beside[0] == b""


def test_u14_loras_salts_and_contents_never_share_a_block() -> None:
    keys = scheme()
    tokens = range(8)
    roots = [
        keys.root(),
        keys.root(lora="0"),
        keys.root(lora="1"),
        keys.root(salt="a"),
        keys.root(salt="b"),
        keys.root(salt="a", lora="0"),
    ]
    chains = [keys.chain(tokens, parent=root) for root in roots]
    images = [((2, b"cat"),), ((2, b"dog"),), ((3, b"cat"),), ((2, b"cat"), (2, b"dog"))]
    chains += [keys.chain(tokens, extra=extra) for extra in images]
    everything = [key for chain in chains for key in chain]
    assert len(set(everything)) == len(everything)
    assert chains == [keys.chain(tokens, parent=root) for root in roots] + [
        keys.chain(tokens, extra=extra) for extra in images
    ], "inside each of them reuse is full"


def test_an_image_in_the_second_block_leaves_the_first_key_unchanged() -> None:
    keys = scheme()
    plain, with_image = keys.chain(range(12)), keys.chain(range(12), extra=[(5, b"cat")])
    assert plain[0] == with_image[0]
    assert not set(plain[1:]) & set(with_image[1:])


def test_the_order_of_extras_does_not_matter() -> None:
    keys = scheme()
    extra = [(5, b"cat"), (1, b"dog"), (5, b"ant")]
    assert keys.chain(range(8), extra=extra) == keys.chain(range(8), extra=extra[::-1])


def test_names_of_different_fields_do_not_collide() -> None:
    spaces = [
        namespace({"a": "bc"}),
        namespace({"ab": "c"}),
        namespace({"a": "b", "c": ""}),
        namespace({"a": "bc"}, salt="d"),
        namespace({"a": "bcd"}),
        namespace({}),
    ]
    assert len(set(spaces)) == len(spaces)
    keys = scheme()
    assert keys.root(salt="ab", lora="c") != keys.root(salt="a", lora="bc")
    assert scheme(2).root() != scheme(4).root()


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "1"])
def test_strange_tokens_are_refused(token: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        scheme().chain([0, 0, 0, token])  # type: ignore[list-item]


@pytest.mark.parametrize("offset", [-1, 4])
def test_an_extra_outside_the_tokens_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="extra at token"):
        scheme().chain(range(4), extra=[(offset, b"x")])


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 tokens"):
        scheme(0)
