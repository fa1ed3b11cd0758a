"""Products without a GPU: what is handed on to torch, and how a product is described to cuBLASLt."""

from __future__ import annotations

import pytest
import torch

from gpu.products import Product, Remembered, _product_of, _right, measured, multiply


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_it_is_the_matrix_product_in_place_and_on_top():
    a, b, out = random(4, 6), random(6, 5), random(4, 5)
    before = out.clone()
    torch.testing.assert_close(multiply(a, b), a @ b)
    assert multiply(a, b, out, add=True) is out
    torch.testing.assert_close(out, before + a @ b)
    assert multiply(a, b, out) is out
    torch.testing.assert_close(out, a @ b)


def test_nothing_is_measured_on_a_cpu():
    multiply(random(4, 6), random(6, 5))
    assert measured() == {}


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_a_product_is_described_by_sizes_strides_and_which_side_is_transposed(a_transposed, b_transposed):
    a = random(40, 30).t() if a_transposed else random(30, 64)[:, :40]
    b = random(20, 40).t() if b_transposed else random(40, 20)
    found = _product_of(a, b, random(30, 32)[:, :20], add=True)
    strides = (30 if a_transposed else 64, 40 if b_transposed else 20, 32)
    assert found is not None
    assert found == Product(30, 20, 40, a_transposed, b_transposed, *strides, True, found.alignment)
    assert found.flop == 2 * 30 * 20 * 40


def test_products_that_differ_are_called_by_different_names():
    a, wide, out = random(32, 32), random(32, 64), random(32, 32)
    pairs = [(a, a), (a, a.t()), (a.t(), wide), (a, wide[:, 32:]), (wide[:, 32:], a), (wide.t(), a)]
    found = [_product_of(x, y, random(x.shape[0], y.shape[1]), add) for x, y in pairs for add in (False, True)]
    assert len({each.text for each in found if each}) == len(found) == len(set(found))
    assert _product_of(a, a.t(), out, False)._replace(alignment=256).text == "32x32 32x32t"
    assert _product_of(wide[:, 32:], a, wide[:, :32], True)._replace(alignment=16).text == (
        "32x32/64 32x32 into/64 added @16"
    )


def test_alignment_is_that_of_the_worst_operand():
    a, b, out = random(32, 64), random(64, 32), random(32, 32)
    offset = torch.zeros(64 * 32 + 4)[4:].view(64, 32)  # 16 bytes further on
    assert _product_of(a, offset, out, False).alignment == 16
    assert _product_of(a, b, out, False).alignment >= 64


def test_other_strides_are_left_to_torch():
    every_second = random(30, 80)[:, ::2]
    assert _product_of(every_second, random(40, 20), random(30, 20), False) is None
    assert _product_of(random(30, 40), random(40, 20), random(20, 30).t(), False) is None


def test_an_algorithm_that_is_refused_or_wrong_does_not_stop_the_others():
    """Tried like cuBLASLt's proposals; the number stands for the algorithm."""
    a, b, out = random(40, 6), random(6, 5), random(40, 5)

    class Plan:
        product = _product_of(a, b, out, False)
        algorithm = 0

        def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if self.algorithm == 2:
                raise RuntimeError("cublasLtMatmul returned status 15")
            torch.mm(a, b, out=out)
            out.mul_(1.1 if self.algorithm == 3 else 1.0)

    assert _right(Plan(), [1, 2, 3, 4], a, b, out) == [1, 4]  # type: ignore[arg-type, list-item]


def test_what_was_measured_is_remembered_for_the_same_gpu_and_library_only(tmp_path):
    path = tmp_path / "compile_cache" / "products.json"
    product = Product(8192, 5120, 25600, False, True, 25600, 25600, 5120, False, 256)
    algorithm = bytes(range(64)).hex()
    assert Remembered.read(path, "H200, cuBLASLt 130100").products == {}
    Remembered("H200, cuBLASLt 130100", {product: (algorithm, 2.5, 2.25)}).write(path)
    assert Remembered.read(path, "H200, cuBLASLt 130100").products == {product: (algorithm, 2.5, 2.25)}
    assert Remembered.read(path, "H200, cuBLASLt 130200").products == {}
    path.write_text(path.read_text()[:-20])
    assert Remembered.read(path, "H200, cuBLASLt 130100").products == {}
