from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eldr.engine.uncovered import UncoveredBlocks

BLOCK_SIZE = 4
TABLE = (7, 3, 9, 5, 1)
POSITIONS = st.integers(0, len(TABLE) * BLOCK_SIZE)


class Uncovered(RuleBasedStateMachine):
    """Against the plain statement: uncovered from the marking until the first slot is computed."""

    def __init__(self):
        super().__init__()
        self.blocks = UncoveredBlocks(BLOCK_SIZE)
        self.model = set()

    @rule(start=POSITIONS, stop=POSITIONS)
    def loaded(self, start, stop):
        self.blocks.add_tokens(TABLE, start, stop)
        self.model |= {TABLE[p // BLOCK_SIZE] for p in range(start, stop)}

    @rule(start=POSITIONS, stop=POSITIONS)
    def computed(self, start, stop):
        self.blocks.computed(TABLE, start, stop)
        self.model -= {TABLE[p // BLOCK_SIZE] for p in range(start, stop) if p % BLOCK_SIZE == 0}

    @rule(block=st.sampled_from(TABLE))
    def copied(self, block):
        self.blocks.add((block,))
        self.model.add(block)

    @invariant()
    def same(self):
        assert {block for block in TABLE if block in self.blocks} == self.model
        assert len(self.blocks) == len(self.model)


TestUncovered = Uncovered.TestCase
TestUncovered.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
