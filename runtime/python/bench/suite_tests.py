"""Tests of PyTorch's DistributedTest for one backend: suite.py runs this file, and ranks that are spawned import it."""

from __future__ import annotations

import json
import os
import re
import sys
import unittest

import torch
from torch.testing._internal.common_distributed import DistTestCases

BACKEND, MEANT, START = (os.environ[name] for name in ("BACKEND", "SUITE_MEANT", "SUITE_START"))


class Name(str):
    """The name of the backend, which equals that of the one that a test is for, too."""

    def __eq__(self, other: object) -> bool:
        return other in (BACKEND, MEANT)

    def __hash__(self) -> int:
        return hash(BACKEND)


# The suite knows PyTorch's own backends by name and skips the tests for the others: when it is imported, by decorators,
# and within some tests.
for feature in ("ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add(BACKEND)
os.environ["BACKEND"] = MEANT
from torch.testing._internal.distributed import distributed_test  # noqa: E402

os.environ["BACKEND"] = BACKEND
distributed_test.BACKEND = Name(BACKEND)


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        if START == "spawn":
            self._spawn_processes()
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Result(unittest.TextTestResult):
    """Writes a line for each test: its name, and why it did not pass."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.reason = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.reason = f"skipped: {reason}"

    def addError(self, test: unittest.TestCase, err) -> None:
        super().addError(test, err)
        self.note(err)

    def addFailure(self, test: unittest.TestCase, err) -> None:
        super().addFailure(test, err)
        self.note(err)

    def note(self, err) -> None:
        # The text ends with how to repeat the test; before that is the exception of a rank.
        errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", str(err[1]), re.MULTILINE)
        self.reason = errors[-1] if errors else f"{err[0].__name__}: {err[1]}"

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        with open(os.environ["SUITE_RESULTS"], "a") as file:
            file.write(json.dumps([test._testMethodName, self.reason]) + "\n")


if __name__ == "__main__":
    tests = unittest.TestSuite(Suite(name) for name in sys.argv[1:])
    unittest.TextTestRunner(resultclass=Result).run(tests)
