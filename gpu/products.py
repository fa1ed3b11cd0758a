"""Matrix products on a GPU by the cuBLASLt algorithm that was the fastest when measured here, at start.

cuBLAS picks an algorithm by a rule made for a cool chip. A drafter's step is products for four fifths of its time and
runs at the chip's power limit (H200: 700 W, 1.3-1.6 of 1.98 GHz), where other algorithms that spend less energy are
4-8 % faster. `tuned` notes the products of one step, then measures cuBLASLt's own proposals for each large one: first
in short bursts, then the best few in bursts long enough to be throttled for what they spend. Nothing else changes: same
type, same float32 accumulation. Whatever does not work leaves torch.mm in place. What was measured is remembered in a
file, for the same GPU and cuBLASLt, so that a restart checks the results but measures nothing.

Needs torch's own libcublasLt, reached through its C interface (stable since CUDA 11). Source: NVIDIA cuBLAS
documentation, cublasLtMatmul and cublasLtMatmulAlgoGetHeuristic.
Shapes: products [M, K] x [K, N], row-major or transposed views.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from configs.run_files import write_atomically

LEAST_FLOP = 5e10
PROPOSALS, FINALISTS = 32, 3
SHORT_MS, LONG_MS = 4.0, 150.0
_WORKSPACE = 64 << 20
_BFLOAT16, _FLOAT32, _COMPUTE_FLOAT32 = 14, 0, 68
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4
_MAX_WORKSPACE, _REDUCTIONS, _MIN_ALIGNMENT = 1, 3, (5, 6, 7, 8)
_IN_FLOAT32 = 2
"""Of the ways to add up the parts of a product split along K, the one that does it in the type it computes in."""
_RESULT_BYTES = 96
_FULL_ALIGNMENT = 256
_ALGORITHM = ctypes.c_uint64 * 8
"""cublasLtMatmulAlgo_t: opaque, may be stored and used again with the same version of the library."""


class Product(NamedTuple):
    """What a cuBLASLt algorithm depends on. `add`: the result is added to what is there. Strides in elements."""

    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool
    a_stride: int
    b_stride: int
    out_stride: int
    add: bool
    alignment: int

    @property
    def flop(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k

    @property
    def text(self) -> str:
        """Sizes; `t`: transposed, `/64`: rows lie that far apart in a wider matrix, `@16`: only so well aligned."""
        sides = (
            f"{self.m}x{self.k}" + _layout(self.a_transposed, self.a_stride, self.m if self.a_transposed else self.k),
            f"{self.k}x{self.n}" + _layout(self.b_transposed, self.b_stride, self.k if self.b_transposed else self.n),
        )
        into = _layout(False, self.out_stride, self.n)
        notes = (f" into{into}" if into else "", " added" if self.add else "")
        aligned = "" if self.alignment == _FULL_ALIGNMENT else f" @{self.alignment}"
        return " ".join(sides) + "".join(notes) + aligned


def _layout(transposed: bool, stride: int, plain: int) -> str:
    return ("t" if transposed else "") + ("" if stride == plain else f"/{stride}")


_plans: dict[Product, _Plan] = {}
_seen: dict[Product, int] = {}
_recording: list[bool] = []


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return a @ b, in `out` where given; with `add` on top of what `out` holds."""
    if (_plans or _recording) and a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        result = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        product = _product_of(a, b, result, add)
        if _recording and product is not None:
            _seen[product] = _seen.get(product, 0) + 1
        plan = _plans.get(product) if product is not None else None
        if plan is not None:
            plan.run(a, b, result)
            return result
    if add and out is not None:
        return out.addmm_(a, b)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def tuned(one_step: Callable[[], None], say: Callable[[str], None], memory: Path | None = None) -> int:
    """Run `one_step`, measure the algorithms of its large products and use the best from now on; returns how many.

    `memory`: a file of what was measured before; what is not in it is measured and added.
    """
    _seen.clear()
    _recording.append(True)
    try:
        one_step()
    finally:
        _recording.clear()
    wanted = [product for product in _seen if product.flop >= LEAST_FLOP and product not in _plans]
    try:
        library = _Library()
        known = Remembered.read(memory, library.made_for)
        for product in wanted:
            best = _recalled(library, product, known) or _fastest(library, product)
            if best is not None:
                _plans[product] = best
        if memory is not None and any(product not in known.products for product in _plans):
            found = {each: plan.remembered for each, plan in _plans.items()}
            Remembered(library.made_for, known.products | found).write(memory)
    except Exception as error:  # another cuBLAS, no memory for the trial: torch.mm does as well
        say(f"products are left to torch.mm: {(str(error) or repr(error)).splitlines()[0]}")
    return len([product for product in _seen if product in _plans])


def measured() -> dict[str, tuple[float, float]]:
    """Return for each measured product the milliseconds of cuBLAS's own first choice and of the one in use."""
    return {product.text: (plan.first_ms, plan.best_ms) for product, plan in _plans.items()}


def forget() -> None:
    """Leave all products to torch.mm again."""
    _plans.clear()


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Leave all products to torch.mm for a while, to compare."""
    plans = dict(_plans)
    _plans.clear()
    try:
        yield
    finally:
        _plans.update(plans)


def _product_of(a: Tensor, b: Tensor, out: Tensor, add: bool) -> Product | None:
    """Describe a product; None where a stride is not one of a plain matrix or its transpose."""
    sides = []
    for matrix in (a, b):
        if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]:
            sides.append((False, matrix.stride(0)))
        elif matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]:
            sides.append((True, matrix.stride(1)))
        else:
            return None
    if out.stride(1) != 1:
        return None
    alignment = math.gcd(_FULL_ALIGNMENT, a.data_ptr(), b.data_ptr(), out.data_ptr())
    (a_transposed, a_stride), (b_transposed, b_stride) = sides
    (m, k), n = a.shape, b.shape[1]
    return Product(m, n, k, a_transposed, b_transposed, a_stride, b_stride, out.stride(0), add, alignment)


class Remembered(NamedTuple):
    """What was measured: for which GPU and library, and each product's algorithm with its milliseconds."""

    made_for: str
    products: dict[Product, tuple[str, float, float]]

    @classmethod
    def read(cls, path: Path | None, made_for: str) -> Remembered:
        """Read a file; nothing is remembered where there is none, where it is torn, or made for something else."""
        try:
            raw = json.loads(path.read_text()) if path is not None else {}
            listed = raw["products"] if raw.get("made_for") == made_for else []
            return cls(made_for, {Product(*product): (str(text), first, best) for product, text, first, best in listed})
        except (OSError, ValueError, KeyError, TypeError):
            return cls(made_for, {})

    def write(self, path: Path) -> None:
        """Replace the file; one that cannot be written costs a measurement later."""
        listed = [[list(product), *values] for product, values in self.products.items()]
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"made_for": self.made_for, "products": listed}))


class _Library:
    """cuBLASLt as torch has loaded it. Raises RuntimeError where a call fails."""

    def __init__(self) -> None:
        torch.mm(*(torch.ones(16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
        paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line]
        if not paths:
            raise RuntimeError("torch has not loaded libcublasLt")
        self.calls = ctypes.CDLL(paths[0])
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
        self.calls.cublasLtGetVersion.restype = ctypes.c_size_t
        self.made_for = f"{torch.cuda.get_device_name()}, cuBLASLt {self.calls.cublasLtGetVersion()}"

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a status."""
        status = getattr(self.calls, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned status {status}")

    def made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """Make a descriptor."""
        pointer = ctypes.c_void_p()
        self.call(name, ctypes.byref(pointer), *arguments)
        return pointer

    def set(self, name: str, descriptor: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        """Set an attribute of a descriptor."""
        self.call(name, descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class _Plan:
    """One product with one algorithm. cuBLASLt is column-major, so it computes out^T = b^T a^T."""

    def __init__(self, library: _Library, product: Product) -> None:
        self.library, self.product = library, product
        made = library.made
        self.description = made("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
        for attribute, flag in ((_TRANSPOSE_A, product.b_transposed), (_TRANSPOSE_B, product.a_transposed)):
            value = ctypes.c_int32(flag)
            library.set("cublasLtMatmulDescSetAttribute", self.description, attribute, value)
        m, n, k = product.m, product.n, product.k
        first = (k, n) if product.b_transposed else (n, k)
        second = (m, k) if product.a_transposed else (k, m)
        self.layouts = [
            made(
                "cublasLtMatrixLayoutCreate", _BFLOAT16, ctypes.c_uint64(rows), ctypes.c_uint64(columns),
                ctypes.c_int64(stride),
            )
            for (rows, columns), stride in (
                (first, product.b_stride), (second, product.a_stride), ((n, m), product.out_stride)
            )
        ]  # fmt: skip
        self._one, self._keep = ctypes.c_float(1.0), ctypes.c_float(float(product.add))
        self.algorithm: ctypes.Array[ctypes.c_uint64] | None = None
        self.first_ms = self.best_ms = math.nan

    @property
    def remembered(self) -> tuple[str, float, float]:
        """What a later start needs of it."""
        return bytes(self.algorithm or b"").hex(), self.first_ms, self.best_ms

    def proposals(self) -> list[ctypes.Array[ctypes.c_uint64]]:
        """Ask for algorithms, best first by cuBLAS's own rule."""
        library, count = self.library, ctypes.c_int()
        preference = library.made("cublasLtMatmulPreferenceCreate")
        for attribute, value in (
            (_MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE)),
            (_REDUCTIONS, ctypes.c_uint32(_IN_FLOAT32)),
            *((side, ctypes.c_uint32(self.product.alignment)) for side in _MIN_ALIGNMENT),
        ):
            library.set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, value)
        results = (ctypes.c_char * (_RESULT_BYTES * PROPOSALS))()
        first, second, out = self.layouts
        library.call(
            "cublasLtMatmulAlgoGetHeuristic", library.handle, self.description, first, second, out, out, preference,
            PROPOSALS, results, ctypes.byref(count),
        )  # fmt: skip
        return [_ALGORITHM.from_buffer_copy(results, _RESULT_BYTES * index) for index in range(count.value)]

    def run(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Do the product on the current stream."""
        library, (first, second, result) = self.library, self.layouts
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out, library.workspace)]
        library.call(
            "cublasLtMatmul", library.handle, self.description, ctypes.byref(self._one), pointers[1], first,
            pointers[0], second, ctypes.byref(self._keep), pointers[2], result, pointers[2], result, self.algorithm,
            pointers[3], ctypes.c_size_t(_WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def _fastest(library: _Library, product: Product) -> _Plan | None:
    """Measure the proposals for a product on random data; None where none gives what torch.mm gives."""
    a, b, out = _made_up(product)
    plan = _Plan(library, product)

    def took_ms(algorithm: ctypes.Array[ctypes.c_uint64], burst_ms: float) -> float:
        plan.algorithm = algorithm
        plan.run(a, b, out)
        runs = max(1, round(burst_ms / (product.flop / 7e11)))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(runs):
            plan.run(a, b, out)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / runs

    right = _right(plan, plan.proposals(), a, b, out)
    if not right:
        return None
    short = [(took_ms(algorithm, SHORT_MS), place) for place, algorithm in enumerate(right)]
    finalists = sorted({0, *(place for _, place in sorted(short)[:FINALISTS])})
    rounds = [[took_ms(right[place], LONG_MS) for place in finalists] for _ in range(2)]
    mean_ms = {place: sum(times) / 2 for *times, place in zip(*rounds, finalists, strict=True)}
    best = min(finalists, key=lambda place: mean_ms[place])
    plan.first_ms, plan.best_ms, plan.algorithm = mean_ms[0], mean_ms[best], right[best]
    return plan


def _recalled(library: _Library, product: Product, known: Remembered) -> _Plan | None:
    """Return a remembered algorithm; None where there is none, or where it does not give what torch.mm gives."""
    text, first_ms, best_ms = known.products.get(product, ("", math.nan, math.nan))
    if len(text) != 2 * ctypes.sizeof(_ALGORITHM):
        return None
    plan = _Plan(library, product)
    right = _right(plan, [_ALGORITHM.from_buffer_copy(bytes.fromhex(text))], *_made_up(product))
    if not right:
        return None
    plan.algorithm, plan.first_ms, plan.best_ms = right[0], first_ms, best_ms
    return plan


def _right(
    plan: _Plan, algorithms: list[ctypes.Array[ctypes.c_uint64]], a: Tensor, b: Tensor, out: Tensor
) -> list[ctypes.Array[ctypes.c_uint64]]:
    """Return those algorithms that give what torch.mm gives."""
    some = slice(None, None, max(1, plan.product.m // 64))  # from all over; whole results in float32 take gigabytes
    wanted, right = torch.mm(a[some], b).float(), []
    for algorithm in algorithms:
        plan.algorithm = algorithm
        out.zero_()
        try:
            plan.run(a, b, out)
        except RuntimeError:  # proposed, or remembered, and refused
            continue
        if float((out[some].float() - wanted).norm()) <= 1e-2 * float(wanted.norm()):
            right.append(algorithm)
    return right


def _made_up(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """Random operands of a product, with its strides, and room for its result."""

    def side(rows: int, columns: int, transposed: bool, stride: int) -> Tensor:
        rows, columns = (columns, rows) if transposed else (rows, columns)
        made = torch.randn(rows, stride, device="cuda", dtype=torch.bfloat16)[:, :columns]
        return made.t() if transposed else made

    a = side(product.m, product.k, product.a_transposed, product.a_stride)
    b = side(product.k, product.n, product.b_transposed, product.b_stride)
    return a, b, torch.zeros(product.m, product.out_stride, device="cuda", dtype=torch.bfloat16)[:, : product.n]
