from __future__ import annotations

import pytest

from tests.kernels.cuda import emulation


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> emulation.Device:
    if reason := emulation.why_not():
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("emulated") / "eldr_cuda.so"
    return emulation.Device(emulation.build(out))


@pytest.fixture
def device(built: emulation.Device) -> emulation.Device:
    built.reset(seed=1)
    return built
