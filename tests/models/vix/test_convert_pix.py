"""PiX's state dicts: a golden and named variants."""

from support import vix_files

from hsvit_jax.commands import convert


def test_golden(golden_dir, tmp_path):
    report = convert.convert_file(golden_dir / "pix-pit.npz", tmp_path / "out")
    assert report["parameters"] == 9146
    assert report["max_abs_error"] <= 1e-5 * report["max_abs_logit"]


def test_variants_are_recognised():
    vix_files.check_variants_are_recognised("pix", {"heads": 4, "image_size": 32})
