"""What vLLM's MultiConnector does to a connector that is not alone."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from random import Random

import pytest

from kvladder.errors import ConfigError
from tests.connectors.scripted import TOKENS, Engine

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():  # whatever vLLM warns of when it is imported
    warnings.simplefilter("ignore")
    from tests.connectors.simulated import Simulation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOST = {"host": "1 MiB"}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_computed_on_a_failed_load_of_another_is_not_kept(seed: int) -> None:
    engine = Engine(HOST, seed=seed)
    tokens = Random(seed).choices(range(50), k=30)
    request = engine.add(tokens)
    engine.step(budget=12)
    table = engine.entries[request.request_id].table
    engine.workers[0]._bad_blocks.add(table[1])  # as if another connector's load had failed
    engine.step(budget=12)
    assert request.num_computed_tokens == TOKENS  # the block is computed again
    engine.run()
    for _ in range(2):  # of the first, blocks may be missing whose saves were given up
        engine.loaded = 0
        engine.add(tokens)
        engine.run()
    assert engine.loaded == 29 // TOKENS
    engine.close()


def test_a_request_is_over_for_us_too_where_vllm_knows_one_group_only(tmp_path: Path) -> None:
    one = Simulation(tmp_path, HOST, "full")
    one.add(list(range(20)))
    (request,) = one.requests.values()
    assert one.half.serving
    assert one.connector.request_finished(request, []) == (False, None)
    assert not one.half.serving
    one.run()
    one.close()


def test_another_connector_s_description_and_a_second_of_us_are_refused(tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    one = Simulation(tmp_path, HOST, "full")
    start = one.connector.set_xfer_handshake_metadata_pp_aware
    with pytest.raises(ConfigError, match="another connector described its KV tensors"):
        start({(0, 0): KVConnectorHandshakeMetadata()})
    described = one.ranks[0].half.describe()
    described.taken = True
    with pytest.raises(ConfigError, match="KVLadderConnector is there twice"):
        start({(0, 0): described})
    one.close()
