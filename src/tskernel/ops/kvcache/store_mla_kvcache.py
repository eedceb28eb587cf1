"""store_mla_kvcache: write the latent and the rope key of new tokens into the paged MLA cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, expect_dim, expect_dtype, expect_shape, nbytes, op
from tskernel.ops.kvcache._samples import make_slots
from tskernel.ops.kvcache._store import (
    check_cache,
    check_scale,
    check_slots,
    check_stored,
    scatter_rows,
    to_cache_dtype,
)


@op(
    mutates=("kv_cache",),
    roles=("kv_c", "kv_cache"),
    traits={"page_size": 64, "kv_lora_rank": 512, "rope_dim": 64, "scaled_kv": False},
)
def store_mla_kvcache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
) -> None:
    """Write ``kv_c[t]`` and ``k_pe[t]`` to slot ``slot_mapping[t]``: page ``slot // page_size``, then the offset in it.

    A negative slot, or one past the cache, is skipped: its row is not stored and no memory of the cache changes.
    Slots that are stored must be distinct; with duplicates it is not defined which row stays. With ``scale`` the
    cache holds ``x / scale``. An fp8 cache saturates and takes its encoding from its dtype; without a scale it holds
    the rounded ``x``.

    Shapes: ``kv_c [T, R]``, ``k_pe [T, Dr]`` (any strides), ``kv_cache [pages, page_size, 1, R + Dr]``, written
    through its strides, ``slot_mapping [T]``, ``scale`` one element.
    Dtypes: ``kv_c`` and ``k_pe`` fp32, fp16 or bf16, or already in the dtype of the cache (then copied bit by bit,
    without a scale); ``kv_cache`` fp32, fp16, bf16 or fp8; ``slot_mapping`` int64; ``scale`` fp32; one rounding.
    Raises: ValueError when shapes or dtypes disagree, or the cache has no slot.
    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434; paging by Kwon et al. 2023,
    https://arxiv.org/abs/2309.06180.
    """
    rows = torch.cat((kv_c, k_pe), dim=-1).unsqueeze(1)
    scatter_rows(kv_cache, to_cache_dtype(rows, scale, kv_cache.dtype), slot_mapping)


@store_mla_kvcache.check
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor | None) -> None:
    expect_dim("kv_c", kv_c, 2)
    expect_shape("k_pe", k_pe, (kv_c.shape[0], None))
    check_cache("kv_cache", kv_cache, 1, kv_c.shape[1] + k_pe.shape[1])
    check_stored("kv_c", kv_c, kv_cache)
    expect_dtype("k_pe", k_pe, (kv_c.dtype,))
    check_slots(slot_mapping, kv_c.shape[0])
    check_scale("scale", scale, kv_c, 1)


@store_mla_kvcache.trait_values
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, scale: Tensor | None) -> dict[str, object]:
    return {
        "page_size": kv_cache.shape[1],
        "kv_lora_rank": kv_c.shape[1],
        "rope_dim": k_pe.shape[1],
        "scaled_kv": scale is not None,
    }


@store_mla_kvcache.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    fp8 = torch.float8_e4m3fn
    sizes: dict[str, tuple[int, int, int, int, int, torch.dtype]] = {
        # tokens, pages, page_size, R, Dr, cache dtype
        "ordinary": (5, 2, 64, 512, 64, dtype),
        "one": (1, 1, 1, 2, 2, dtype),
        "odd": (9, 4, 3, 77, 6, dtype),
        "empty": (0, 2, 16, 64, 16, dtype),
        "no_columns": (3, 2, 16, 0, 0, dtype),
        "fp8": (5, 3, 16, 64, 16, fp8),
    }
    for name, (t, pages, page, r, dr, cache_dtype) in sizes.items():
        kv_cache = make.randn((pages, page, 1, r + dr), cache_dtype)
        kv_c, k_pe, slots = make.randn((t, r), dtype), make.randn((t, dr), dtype), make_slots(make, t, pages * page)
        yield Sample(name, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slots)
    latent = make.randn((5, 100), dtype)
    wide_cache = make.randn((3, 16, 2, 96), fp8)
    sliced = {"kv_c": latent[:, 3:67], "k_pe": latent[:, 80:96], "kv_cache": wide_cache[:, :, 1:, 8:88]}
    yield Sample("scaled", **sliced, slot_mapping=make_slots(make, 5, 48), scale=make.tensor([0.5], torch.float32))


@store_mla_kvcache.cost
def _(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Cost:
    stored = (kv_c.numel() + k_pe.numel()) * kv_cache.element_size()
    return Cost(bytes=nbytes(kv_c, k_pe, slot_mapping) + stored, flops=0)
