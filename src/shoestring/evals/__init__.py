from shoestring.evals.perplexity import Perplexity, perplexity
from shoestring.evals.speed import Speed, measure_speed, weight_bytes
from shoestring.evals.tasks import Task, TaskResult, read_task, run_task

__all__ = [
    "Perplexity",
    "Speed",
    "Task",
    "TaskResult",
    "measure_speed",
    "perplexity",
    "read_task",
    "run_task",
    "weight_bytes",
]
