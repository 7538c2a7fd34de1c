"""Tensors that the product makes name their device: a script may have set another default one."""

from __future__ import annotations

import ast

from test_imports import FILES

MAKES = {"tensor", "as_tensor", "asarray", "scalar_tensor", "empty", "empty_strided", "zeros", "ones", "full", "eye"}
MAKES |= {"arange", "linspace", "logspace", "rand", "randn", "randint", "randperm", "normal"}


def test_tensors_name_their_device() -> None:
    """But for those of models, which belong where the script wants its model."""
    without, number = [], 0
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.removeprefix("torch.") in MAKES and called.startswith("torch."):
                number += 1
                if all(keyword.arg != "device" for keyword in node.keywords):
                    without.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert number > 30
    assert [line for line in without if not line.startswith("ds_vpipe.models.")] == []
