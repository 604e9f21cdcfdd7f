"""A connector beside others under vLLM's MultiConnector."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from kvladder.errors import ConfigError
from tests.connectors.scripted import TOKENS, Engine

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from kvladder.connectors.vllm.step import RankDescription, carried, carry
    from tests.connectors.simulated import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOST = {"host": "1 MiB"}


@pytest.mark.parametrize("seed", range(20))
def test_blocks_computed_on_another_connectors_failed_load_are_not_kept(seed: int) -> None:
    engine = Engine(HOST, seed=seed)
    tokens = Random(seed).choices(range(50), k=30)
    request = engine.add(tokens)
    engine.step(budget=12)
    table = engine.entries[request.request_id].table
    engine.workers[0]._bad_blocks.add(table[1])  # as if another connector's load had failed
    engine.step(budget=12)
    assert request.num_computed_tokens == TOKENS  # the block is computed again
    engine.run()
    for _ in range(2):  # the first request may lack blocks whose saves were abandoned
        engine.loaded = 0
        engine.add(tokens)
        engine.run()
    assert engine.loaded == 29 // TOKENS
    engine.close()


def test_a_request_ends_for_kvladder_too_where_vllm_knows_only_one_group(tmp_path: Path) -> None:
    one = Simulation(tmp_path, HOST, "full")
    one.add(list(range(20)))
    (request,) = one.requests.values()
    assert one.half.serving
    assert one.connector.request_finished(request, []) == (False, None)
    assert not one.half.serving
    one.run()
    one.close()


def test_a_foreign_description_and_a_second_kvladder_connector_are_refused(tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    one = Simulation(tmp_path, HOST, "full")
    start = one.connector.set_xfer_handshake_metadata_pp_aware
    with pytest.raises(ConfigError, match="description of another connector, but not of this"):
        start({(0, 0): KVConnectorHandshakeMetadata()})
    described = one.ranks[0].half.describe()
    described.taken = True
    with pytest.raises(ConfigError, match="KVLadderConnector is listed twice"):
        start({(0, 0): described})
    one.close()


def test_another_connectors_description_carries_kvladders_and_stays_the_same() -> None:
    """Over processes, and to the other connector, which encodes its own."""
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

    ours = RankDescription(3, "here", (4096,), {"field": "value"}, b"", worker=object())
    theirs = NixlHandshakePayload("hash", b"agent")
    said = msgspec.msgpack.encode(theirs)
    none = SimpleNamespace(get_handshake_metadata=lambda: None)
    other = SimpleNamespace(get_handshake_metadata=lambda: theirs)
    assert carry(ours, [none]) is ours
    assert carry(ours, [none, other]) is theirs
    assert carried([theirs]) == carried([ours]) == {3: ours}
    (found,) = carried([pickle.loads(pickle.dumps(theirs))]).values()
    assert (found.rank, found.fields, found.worker) == (3, {"field": "value"}, None)
    assert msgspec.msgpack.encode(theirs) == said
    assert carry(ours, [SimpleNamespace(get_handshake_metadata=object)]) is ours  # it takes nothing


def test_a_request_of_another_connector_is_searched_for_once_its_load_failed() -> None:
    engine = Engine(HOST, handed_over=True)
    tokens = Random(1).choices(range(50), k=30)
    engine.add(tokens)
    engine.run()
    brought = {"do_remote_prefill": True}
    request = engine.add(tokens, kv_transfer_params=brought)
    assert engine.half.ask(request, 0) == (0, False)
    assert not engine.half._answers.pins
    brought["do_remote_prefill"] = False  # NixlConnector sets this once it has tried
    engine.run()
    assert engine.loaded == 29 // TOKENS
    engine.close()


def test_a_producer_saves_and_a_consumer_loads_and_saves_only_on_request(tmp_path: Path) -> None:
    always = {"when": "always", "deadline": "1 h"}
    source = {**HOST, "files": str(tmp_path / "kv"), "capacity": "1 MiB", "fetch": always}
    tokens, more = (Random(seed).choices(range(50), k=30) for seed in range(2))
    blocks = 29 // TOKENS

    def twice(role: str, *, params: object = None) -> list[int]:
        """Return how many blocks each of two prompts finds when it is given a second time."""
        engine = Engine(source, role=role)
        found: list[int] = []
        for prompt in (tokens, more, tokens, more):
            engine.loaded = 0
            engine.add(prompt, kv_transfer_params={"kvladder": params})
            engine.run()
            found.append(engine.loaded)
        engine.close()
        return found

    engine = Engine(source, role="kv_producer")
    for _ in range(2):
        engine.add(tokens)
        engine.run()
    assert engine.loaded == 0
    engine.close()
    assert twice("kv_consumer") == [blocks, 0, blocks, 0]
    assert twice("kv_consumer", params={"save": True}) == [blocks, 0, blocks, blocks]
    assert twice("kv_producer") == [0, 0, 0, 0]
    assert twice("kv_both", params={"save": False}) == [blocks] * 4
