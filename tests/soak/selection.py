"""A case of every class of faults: drawn once, by ``next(drawn(seed))``, and written down.

``make campaigns`` runs them all, ``make test`` three of them.
"""

SELECTION = (
    "kill-backward/scattered/3/1/20/raise",
    "kill-any/default/2/1/trying/exit",
    "kill-any/default/2/1/measuring/exit",
    "stop-backward/lean-sgd/2/1/9/raise",
    "stop-short-any/planner-lanes/2/0/12/exit",
    "raise-forward/oktopk/3/2/17/exit",
    "raise-logger/batch-norm/2/0/9/raise",
    "slow-backward/bf16/2/1/19/destroy",
    "late-data/scattered/2/1/7/raise",
    "exit-data/lean-oktopk/3/0/11/raise",
    "out-of-inputs/join/2/0/9/exit",
    "extra-evaluation/static-graph/2/1/15/exit",
    "nan-skipped/bucket-view/2/1/21/exit",
    "other-shapes/default/3/2/0/raise",
    "other-planner/scattered/2/1/0/exit",
    "frozen-before/given-plan/2/0/0/exit",
    "frozen-everywhere/no-tuning/2/0/5/raise",
    "frozen-later/find-unused/2/1/24/destroy",
    "other-batch/find-unused/3/2/17/exit",
    "replan-alone/scattered/2/1/18/exit",
    "hold-everywhere/planner-single/2/0/13/exit",
    "resume/lean-oktopk-int8/2/1/9/exit",
    "restart/planner-optimal/2/0/22/raise",
    "loop/scattered/2/0/9/exit",
    "hostile-plan/default/2/0/0/exit",
    "kill-saving/scattered/2/0/0/raise",
    "links-slower/scattered/2/1/9/exit",
)
BRIEF = (
    "kill-backward/scattered/3/1/20/raise",
    "nan-skipped/bucket-view/2/1/21/exit",
    "other-planner/scattered/2/1/0/exit",
)
