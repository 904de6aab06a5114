"""The process that Spark's Python workers are forked from."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_BATCHES = """
import resource
from modak.spark.daemon import reuse_memory

reuse_memory()

def batch():
    return [bytearray(4 << 20) for _ in range(4)]

batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have other ways")
def test_what_one_batch_frees_is_there_for_the_next() -> None:
    asked = subprocess.run([sys.executable, "-c", _BATCHES], capture_output=True, text=True, timeout=60, check=True)
    pages_of_a_batch = (16 << 20) // 4096
    assert int(asked.stdout) < pages_of_a_batch, "fifty batches, but not fifty times their pages"
