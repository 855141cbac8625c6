import pytest

from eldr.engine.fault import contained, nothing


class Hook:
    failed = False

    def __init__(self):
        self.calls = 0

    @contained(lambda value: value)
    def finish(self, value):
        self.calls += 1
        return {"eldr": 1 / value}

    @contained(nothing)
    def receive(self):
        self.calls += 1
        return "received"


def test_a_fault_switches_off_and_the_request_goes_on(caplog):
    hook = Hook()
    assert hook.finish(2) == {"eldr": 0.5}
    assert hook.finish(0) == 0
    assert "ELDR failed in finish" in caplog.text
    assert hook.finish(2) == 2
    assert hook.receive() is None
    assert hook.calls == 2


def test_interrupts_are_not_faults():
    class Interrupted(Hook):
        @contained(nothing)
        def receive(self):
            raise KeyboardInterrupt

    hook = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        hook.receive()
    assert not hook.failed
