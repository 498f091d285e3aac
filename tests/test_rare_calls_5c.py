"""Rare but legitimate calls: infinite logits, far windows, counts, and buffers that change."""

import math

import pytest
import torch

from attnlib.deit import soft_distillation_loss

# --- a teacher that excludes classes ---------------------------------------------------------


@pytest.mark.parametrize("excluded", [-math.inf, -1e4])
@pytest.mark.parametrize("student_excludes", [True, False])
def test_a_class_that_the_teacher_excludes_adds_nothing(excluded, student_excludes):
    teacher = torch.tensor([[1.0, excluded, 0.5], [0.0, 2.0, excluded]])
    student = torch.tensor([[0.3, 0.2, 0.1], [-1.0, 0.5, 2.0]])
    if student_excludes:
        student[0, 1] = excluded
    student.requires_grad_()
    labels = torch.tensor([0, 1])
    loss = soft_distillation_loss(
        student, student, teacher, labels, weight=1.0, temperature=2.0
    )
    expected = 0.0
    for taught, told in zip(teacher.tolist(), student.tolist()):
        p_total = sum(math.exp(value / 2) for value in taught)
        q_total = sum(math.exp(value / 2) for value in told)
        for a, b in zip(taught, told):
            p = math.exp(a / 2) / p_total
            if p > 0:
                expected += 4 * p * math.log(p / (math.exp(b / 2) / q_total)) / 6
    torch.testing.assert_close(loss.item(), expected, rtol=1e-5, atol=1e-7)
    loss.backward()
    p, q = (teacher / 2).softmax(-1), (student.detach() / 2).softmax(-1)
    torch.testing.assert_close(student.grad, 4 * (q - p) / 2 / 6)


def test_a_class_that_only_the_student_excludes_costs_infinitely_much():
    teacher = torch.tensor([[1.0, 0.0]])
    student = torch.tensor([[1.0, -math.inf]])
    loss = soft_distillation_loss(student, student, teacher, torch.tensor([0]))
    assert loss == math.inf
