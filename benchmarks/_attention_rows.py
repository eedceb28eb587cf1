"""The attention calls that the benchmark times, and what each must at least move and multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LATENT, ROPE, NOPE = 512, 64, 128  # widths of DeepSeek's latent attention


@dataclass(frozen=True)
class Row:
    """One shape: ``batch`` requests of ``keys`` visible tokens, of which the last ``queries`` are the queries.

    ``kind`` names the op: prefill (packed, queries = keys), decode, extend (paged, ragged queries) or mla (absorbed
    latent decode, one KV head of 512 + 64). ``group`` is the table it is shown in.
    """

    group: str
    kind: str
    batch: int
    keys: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    page: int = 64
    window: int = -1
    sinks: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        """What the row is called in tables and by ``--rows``."""
        shape = f"{self.batch} x {self.keys}"
        if self.kind in ("decode", "extend") or (self.kind == "mla" and self.queries > 1):
            shape += f" q{self.queries}" if self.queries > 1 else ""
        heads = f"{self.heads}" if self.kind == "mla" else f"{self.heads}/{self.kv_heads}/{self.width}"
        extras = [
            f"page {self.page}" if self.kind == "decode" and self.page != 64 else "",
            f"window {self.window}" if self.window >= 0 else "",
            "sinks" if self.sinks else "",
            "fp8 KV" if self.fp8 else "",
        ]
        return " ".join([self.kind, shape, heads, *filter(None, extras)])

    @property
    def value_width(self) -> int:
        """The width of a result."""
        return LATENT if self.kind == "mla" else self.width

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return (NOPE + ROPE if self.kind == "mla" else self.width) ** -0.5

    @property
    def query_rows(self) -> int:
        """How many query tokens the call has."""
        return self.batch * self.queries

    def visible(self, query: int) -> int:
        """Return how many keys the ``query``-th query of a request sees."""
        seen = self.keys - self.queries + query + 1
        return seen if self.window < 0 else min(seen, self.window + 1)

    @property
    def pairs(self) -> int:
        """Query-key pairs of one request that the mask leaves."""
        return sum(self.visible(i) for i in range(self.queries))

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products; masked pairs do not count."""
        return 2 * self.batch * self.heads * self.pairs * (self.width + self.value_width)

    @property
    def key_bytes(self) -> int:
        """Bytes of one token in the cache."""
        if self.kind == "mla":
            return 2 * self.width
        return 2 * self.kv_heads * self.width * (1 if self.fp8 else 2)

    @property
    def bytes(self) -> int:
        """Bytes a call must at least move: queries, results, and each key that any query sees once."""
        keys = self.keys if self.window < 0 else min(self.keys, self.window + self.queries)
        rows = 2 * self.query_rows * self.heads * (self.width + self.value_width)
        return self.batch * keys * self.key_bytes + rows

    @property
    def cache_bytes(self) -> int:
        """Bytes of one set of keys and values, whether or not the call reads all of them."""
        return self.batch * self.keys * self.key_bytes

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the time that no call can beat on a machine with these rates."""
        return 1e6 * max(self.bytes / bytes_per_s, self.flops / flops_per_s)

    def rate(self, us: float) -> str:
        """Return a time as the rate that limits this kind of call."""
        if self.kind == "prefill":
            return f"{self.flops / us / 1e6:.0f} TFLOP/s"
        return f"{self.bytes / us / 1e6:.2f} TB/s"


def _prefill(batch: int, length: int, heads: int, kv_heads: int, width: int, *, window: int = -1) -> Row:
    return Row("prefill", "prefill", batch, length, length, heads, kv_heads, width, window=window, sinks=window >= 0)


def _gpt_oss(batch: int, length: int) -> Row:
    return Row("gpt-oss", "prefill", batch, length, length, 64, 8, 64, sinks=True)


def _decode(
    batch: int, keys: int, heads: int, kv_heads: int, width: int, *, queries: int = 1, page: int = 64,
    window: int = -1, fp8: bool = False,
) -> Row:  # fmt: skip
    shape = (batch, keys, queries, heads, kv_heads, width)
    return Row("decode", "decode", *shape, page=page, window=window, fp8=fp8)


ROWS: Final[tuple[Row, ...]] = (
    _decode(1, 8192, 64, 8, 128),
    _decode(1, 131072, 64, 8, 128),
    _decode(8, 8192, 64, 8, 128),
    _decode(32, 2048, 32, 8, 128, page=16),
    _decode(64, 4096, 64, 8, 128),
    _decode(256, 1024, 64, 8, 64),
    _decode(64, 4096, 64, 8, 64, window=127),
    _decode(128, 4096, 8, 1, 128),
    _decode(16, 4096, 64, 8, 128, queries=4),
    _decode(64, 4096, 64, 8, 128, fp8=True),
    _prefill(1, 8192, 64, 8, 128),
    _prefill(4, 4096, 64, 8, 128),
    _prefill(16, 1024, 32, 8, 128),
    _prefill(1, 32768, 32, 8, 128),
    _prefill(4, 4096, 64, 8, 64),
    _prefill(1, 8192, 16, 16, 256),
    _prefill(4, 4096, 64, 8, 64, window=127),
    # 4 x 4096 is the eighth prefill row of anchors.md
    *(_gpt_oss(batch, length) for length in (1024, 4096, 8192) for batch in (1, 2, 4, 8, 16)),
    Row("extend", "extend", 64, 32768, 4, 64, 8, 128),
    Row("extend", "extend", 16, 8192, 64, 64, 8, 128),
    *(
        Row("mla", "mla", batch, 8192 if batch == 1 else 4096, queries, heads, 1, LATENT + ROPE)
        for heads in (128, 16)
        for queries in (1, 2)
        for batch in (1, 16, 64, 128)
    ),
)


def chosen(words: list[str]) -> list[Row]:
    """Return the rows whose group is one of ``words`` or whose name holds one; all for no words."""
    return [r for r in ROWS if not words or any(w == r.group or w in r.name for w in words)]
