"""Pictures compared: SSIM and PSNR against torchmetrics, intervals against scipy and by hand."""

import numpy as np
import pytest
import torch
from scipy import stats

from tests.references import reference
from vitdeploy.runtime.tasks.image_to_image import psnr
from vitdeploy.tasks.image_to_image import compare_pictures, mean_with_interval, ssim


def picture(seed, height=24, width=31, channels=3):
    """Smooth colours with some noise."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / (3 + c)) * np.cos(y / (4 + c)) for c in range(channels)], axis=-1)
    return np.clip(128 + 90 * waves + generator.normal(0, 8, waves.shape), 0, 255).astype(np.uint8)


def noisy(pixels, deviation, seed=9):
    noise = np.random.default_rng(seed).normal(0, deviation, pixels.shape)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


def tensor(pixels):
    return torch.from_numpy(pixels.astype(np.float64)).permute(2, 0, 1)[None]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("deviation", [2, 20, 80])
def test_ssim_and_psnr_are_those_of_torchmetrics(channels, deviation):
    library = reference("torchmetrics.functional.image")
    a = picture(0, channels=channels)
    b = noisy(a, deviation)
    _, theirs = library.structural_similarity_index_measure(
        tensor(b), tensor(a), data_range=255.0, sigma=1.5, return_full_image=True
    )
    # Its mean is over windows beyond the borders, too, as if the picture were mirrored there.
    assert ssim(b, a) == pytest.approx(float(theirs[..., 5:-5, 5:-5].mean()), rel=1e-6)
    theirs = library.peak_signal_noise_ratio(tensor(b), tensor(a), data_range=255.0)
    assert psnr(b, a) == pytest.approx(float(theirs), rel=1e-6)


def test_drops_are_means_of_paired_differences_with_students_interval():
    targets = [picture(seed) for seed in range(6)]
    theirs = [noisy(target, 4, seed) for seed, target in enumerate(targets)]
    ours = [noisy(target, 9 + seed, seed) for seed, target in enumerate(targets)]
    found = compare_pictures(ours, theirs, targets)
    apart = [100 * (ssim(b, t) - ssim(a, t)) for a, b, t in zip(ours, theirs, targets, strict=True)]
    assert (found.metric, found.n) == ("SSIM", 6)
    assert found.drop == pytest.approx(np.mean(apart)) == pytest.approx(found.reference_value - found.value)
    assert found.drop_ci95 == pytest.approx(stats.ttest_1samp(apart, 0).confidence_interval(0.95))
    assert found.psnr_drop == pytest.approx(found.reference_psnr - found.psnr)
    assert found.psnr_drop_ci95[0] < found.psnr_drop < found.psnr_drop_ci95[1]
    assert found.psnr_to_original_min < found.psnr_to_original_mean


def test_agreement_counts_pictures_that_nobody_could_tell_from_the_originals():
    theirs = [picture(seed) // 2 for seed in range(4)]
    ours = [theirs[0], theirs[1] + np.uint8(2), theirs[2] + np.uint8(3), theirs[3] + np.uint8(40)]  # 42 and 39 dB
    found = compare_pictures(ours, theirs, None)
    assert (found.agreement, found.metric, found.value, found.psnr) == (50, None, None, None)
    assert found.max_difference == 40 / 255
    assert found.agreement_ci95[0] < 50 < found.agreement_ci95[1]


def test_one_picture_proves_nothing():
    assert mean_with_interval(np.array([0.5]), 100.0) == (0.5, (-100.0, 100.0))


def test_pictures_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        compare_pictures([picture(0)], [picture(0, height=25)], None)
