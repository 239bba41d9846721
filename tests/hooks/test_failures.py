"""Dynamo's setting for errors while steps run. For hooks.dynamo_settings."""

import threading

from torch._dynamo import config

from collage_fx.hooks.dynamo_settings import Failures


def test_steps_that_overlap_in_two_threads_leave_the_setting_as_it_was() -> None:
    begun, ended = threading.Event(), threading.Event()
    found: list[bool] = []

    def first() -> None:
        with Failures(print).caught():
            begun.set()
            assert ended.wait(10)

    def second() -> None:
        assert begun.wait(10)
        with Failures(print).caught():
            ended.set()
            threads[0].join()
        found.append(bool(config.suppress_errors))

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] and not config.suppress_errors
