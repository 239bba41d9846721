"""Training of the studies in benchmarks/studies, for a few steps."""

import run
import strategies
import tasks
from torch import Tensor


def trained(model: tasks.Model, task: tasks.Task, strategy: str, optimizer: str) -> Tensor:
    """Return the values of each seed after the steps of a task."""
    stack = run.Stack(tasks.start(task, model), task, apart=optimizer in strategies.APART)
    training = strategies.begin(strategy, optimizer, 0.999, stack.start, stack.each)
    for batch in tasks.batches(task):
        model.losses(stack.named(training.weights), *batch).sum().backward()
        training.step(1e-2)
        for w in training.weights:
            w.grad = None
    return stack.rows(training.values())
