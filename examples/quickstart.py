"""A cache for an engine's KV tensor, in ten lines."""

import sys

import torch

import kvladder
from kvladder.connectors.inline import InlineConnector

source = sys.argv[1] if len(sys.argv) > 1 else {"host": "64 MiB"}  # or the path of a stack.yaml
kv = torch.randn(64, 2, 16, 4, 32)  # the engine's paged KV cache: 64 blocks of 16 tokens
layout = kvladder.Layout(block_tokens=16, block_bytes=kv[0].nbytes, fields={"model": "demo"})
with kvladder.open_cache(source, layout=layout) as cache:
    connector = InlineConnector(cache, kv)
    keys = connector.keys(range(100))  # names of the six whole blocks of a prompt
    connector.wait(connector.save(keys, blocks=[0, 1, 2, 3, 4, 5]))
    match = connector.match(keys)  # the longest cached prefix, pinned
    match.wait()  # it may have to come up from a file
    connector.wait(connector.load(match, blocks=[10, 11, 12, 13, 14, 15]))
    assert torch.equal(kv[10:16], kv[0:6])
    connector.close()
print("six blocks saved, and loaded into other places")
