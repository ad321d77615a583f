"""The forms of cross-entropy and of its parts, each against the other."""

import torch

from megalaunch.kernels.cross_entropy import (
    cross_entropy_in_place,
    cross_entropy_reference,
    logits_grad,
    subtract_max,
)

IGNORED = -100


def test_the_in_place_form_equals_the_reference():
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 50), torch.randint(0, 50, (9,))
    labels[3] = IGNORED
    results = []
    for form in (cross_entropy_in_place, cross_entropy_reference):
        leaf = logits.clone().requires_grad_()
        loss = form(leaf * 1.0, labels, IGNORED)  # no leaf: it is overwritten
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_parts_of_the_vocab_parallel_loss_overwrite_their_input_on_a_cpu():
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 50), torch.randint(0, 50, (9,))
    dloss, has_label = torch.rand(9), torch.rand(9) > 0.3
    expected = logits.softmax(dim=1)
    expected_grad = (expected - ((torch.arange(50) == labels[:, None]) & has_label[:, None]).float()) * dloss[:, None]
    shifted = subtract_max(logits, logits.amax(dim=1))
    assert shifted.data_ptr() == logits.data_ptr()
    assert (shifted.amax(dim=1) == 0).all()
    probabilities = shifted.softmax(dim=1)
    torch.testing.assert_close(probabilities, expected)
    found = logits_grad(probabilities, labels, has_label, dloss)
    assert found.data_ptr() == probabilities.data_ptr()
    torch.testing.assert_close(found, expected_grad, rtol=1e-5, atol=1e-6)
