"""Public functions and methods have type hints."""

import importlib
import inspect
import pathlib
import re

import pytest

API = pathlib.Path(__file__).parents[1] / "docs" / "api"
DOCUMENTED = sorted(
    name
    for page in API.glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE)
)


def public_functions(module):
    """Yield (name, function) for the public functions and methods of a module or package."""
    for name in {*vars(module), *getattr(module, "__all__", ())}:
        value = getattr(module, name)
        is_inside = getattr(value, "__module__", "").startswith(module.__name__)
        if name.startswith("_") or not is_inside:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            fields = getattr(value, "__dataclass_fields__", {})  # fields may hold functions
            for method, function in vars(value).items():
                if method in fields or (
                    method == "__init__" and getattr(value, "_is_protocol", False)
                ):
                    continue
                is_public = method == "__init__" or not method.startswith(
                    ("_", "on_")
                )  # not Keras' hooks
                if is_public and inspect.isfunction(function):
                    yield f"{name}.{method}", function


def has_hints(function):
    """Return whether the result and all arguments except *args and **kwargs have type hints."""
    signature = inspect.signature(function)
    variadic = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    parameters = [p for p in signature.parameters.values() if p.kind not in variadic]
    if function.__module__.startswith("keras."):  # Keras wraps `build`
        return True
    returns = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
    return returns and all(p.annotation is not p.empty or p.name == "self" for p in parameters)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_functions_have_type_hints(name):
    functions_by_name = dict(public_functions(importlib.import_module(name)))
    assert functions_by_name, f"{name} has no public functions"
    assert [name for name, function in functions_by_name.items() if not has_hints(function)] == []
