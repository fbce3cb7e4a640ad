"""Rounding and its gradients, against PyTorch's own fake quantizers."""

import pytest
import torch

from vitdeploy.qat.layers import LearnedStep, fake_quantize


@pytest.fixture
def numbers():
    torch.manual_seed(0)
    return 3 * torch.randn(6, 40), torch.rand(6) * 0.05 + 0.01, torch.randn(6, 40)


def test_values_and_gradients_are_those_of_pytorch_per_channel(numbers):
    weight, steps, upstream = numbers
    ours, theirs = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    of_ours, of_theirs = steps.clone().requires_grad_(), steps.clone().requires_grad_()
    found = fake_quantize(ours, of_ours.view(-1, 1), 0, -127, 127, 0.25)
    expected = torch._fake_quantize_learnable_per_channel_affine(theirs, of_theirs, torch.zeros(6), 0, -127, 127, 0.25)
    plain = torch.fake_quantize_per_channel_affine(weight, steps, torch.zeros(6), 0, -127, 127)
    assert (weight.abs() > 127 * steps[:, None]).any() and torch.equal(found, expected) and torch.equal(found, plain)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    torch.testing.assert_close(of_ours.grad, of_theirs.grad, rtol=1e-4, atol=1e-4)


def test_values_and_gradients_are_those_of_pytorch_per_tensor(numbers):
    x, _, upstream = numbers
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    step, other = torch.tensor([0.015], requires_grad=True), torch.tensor([0.015], requires_grad=True)
    found = fake_quantize(ours, step, 90, 0, 255)
    expected = torch._fake_quantize_learnable_per_tensor_affine(theirs, other, torch.tensor([90.0]), 0, 255, 1.0)
    assert (x < -90 * 0.015).any() and (x > 165 * 0.015).any() and torch.equal(found, expected)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    torch.testing.assert_close(step.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_ties_go_to_even_as_in_onnx():
    x = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5])
    assert fake_quantize(x, torch.ones(1), 0, -127, 127).tolist() == [-2, 0, 0, 2, 2]


def test_a_step_starts_as_calibrated_and_stays_positive():
    step = LearnedStep(torch.tensor([0.02, 0.5]))
    assert torch.equal(step(), torch.tensor([0.02, 0.5]))
    with torch.no_grad():
        step.log_ratio -= 20
    assert (step() > 0).all()
    step().sum().backward()
    torch.testing.assert_close(step.log_ratio.grad, step().detach())
