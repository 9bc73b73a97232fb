"""What the other tests rely on: they are run on several devices."""

import jax

from tests.conftest import NUM_DEVICES


def test_there_are_several_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * NUM_DEVICES
