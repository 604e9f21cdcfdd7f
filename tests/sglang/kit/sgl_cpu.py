"""The parts that SGLang's hierarchical cache needs on a CPU; a plug-in for each of its processes.

Three copies between device and host pools, for which ``sgl_kernel`` has kernels for CUDA, and
memory that is not pinned, for host pools and adapters.
"""

import torch


def _all_layers_down(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for half, host in enumerate(dst_ptrs):
        for layer in range(layers):
            device = src_ptrs[half * layers + layer]
            host[dst, layer] = device.view(-1, page_size, *device.shape[1:])[src]


def _one_layer_up(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device.view(-1, page_size, *device.shape[1:])[dst] = host[src, layer_id]


def _unpinned(make):
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def install():
    """Put them in their places."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    build = base.HostKVCache.__init__

    def unpinned(self, *args, **kwargs):
        build(self, *args, **{**kwargs, "pin_memory": False})

    base.HostKVCache.__init__ = unpinned
    mha.transfer_kv_all_layer_direct_lf_pf = _all_layers_down
    mha.transfer_kv_per_layer_direct_pf_lf = _one_layer_up
    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    common._cuda_host_register = lambda *args, **kwargs: None
