"""``headwise run``: programs that import flash_attn and know nothing of Headwise."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import headwise

SOURCE = str(Path(headwise.__file__).resolve().parent.parent)


@pytest.fixture
def run(tmp_path):
    def run(*arguments, program):
        (tmp_path / "beside.py").write_text("VALUE = 17\n")
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        where = [str(path) if a == "PROGRAM" else a for a in arguments]
        command = [sys.executable, "-m", "headwise", "run", *where]
        environment = {**os.environ, "PYTHONPATH": SOURCE}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)

    return run


PROGRAM = """
    import sys
    import beside
    import torch
    import torch.nn.functional as F
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import unpad_input

    q = torch.randn(1, 5, 2, 8)
    out = flash_attn_func(q, q, q, causal=True)
    heads_first = q.transpose(1, 2)
    wanted = F.scaled_dot_product_attention(heads_first, heads_first, heads_first, is_causal=True)
    assert torch.allclose(out, wanted.transpose(1, 2), atol=1e-6)
    print(__name__, sys.argv[1:], beside.VALUE, F.scaled_dot_product_attention.__module__)
    sys.exit(5)
"""


def test_a_program_and_its_arguments(run):
    done = run("PROGRAM", "--epochs", "3", "--sdpa", program=PROGRAM)
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.split() == ["__main__", "['--epochs',", "'3',", "'--sdpa']", "17", "torch._C._nn"]


def test_a_module_with_sdpa_and_a_backend(run):
    done = run("--sdpa", "--backend", "cpu", "-m", "program", program=PROGRAM)
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout.split() == ["__main__", "[]", "17", "headwise.integrations.sdpa"]


def test_an_error_of_the_program_is_its_own(run):
    done = run("PROGRAM", program="raise ValueError('mine')")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no program"),
        (("nothing.py",), "not a file"),
        (("--fallback", "PROGRAM"), "--sdpa"),
        (("--backend", "abacus", "PROGRAM"), "abacus"),
    ],
)
def test_bad_usage(run, arguments, said):
    done = run(*arguments, program="print('ran')")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
