"""A policy of your own: of the two least loaded workers, the one to which experts are nearer."""

from __future__ import annotations

import sys

import numpy as np

from eldr.routing import POLICIES, Choice, Context, Policy, fixed


class TwoChoices(Policy):
    """Looks at two workers only, and takes the one whose next step grows least."""

    name = "two_choices"

    def choose(self, context: Context) -> Choice:
        """Pure: reads the context, answers a slot with its explanation; the fleet commits it."""
        table, slots = context.table, context.candidates
        load = (table.requests[slots] + table.others[slots]) / table.weight[slots]
        if context.activation is None or table.experts is None:  # no signature: load alone
            return Choice(int(slots[load.argmin()]), "fallback", context.reason, scores=load)
        pair = slots[np.argsort(load, kind="stable")[:2]]
        # Chance that an expert is not read yet, times chance that this request reads it: new reads.
        new = fixed.dots(context.activation, table.experts.survival)[pair]
        return Choice(int(pair[new.argmin()]), "two_choices", band=pair)


POLICIES[TwoChoices.name] = TwoChoices  # before the router is imported: it is an option then

if __name__ == "__main__":  # python own_policy.py serve --policy two_choices --prefill ...
    from eldr.cli import main

    sys.exit(main())
