"""`thing.name` without running code of the model: only properties are read, as functions."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import nn

from gate.lint.operations import words
from gate.lint.scope import Arguments, FunctionScope, ShapeMethod, Super, TensorMethod
from gate.lint.source import python_function
from gate.lint.value import NOTHING, Kind, StaticValue, of_object, python, tensor, unknown

_TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "grad", "values", "indices"})
_PYTHON = words(
    """ndim dtype device layout is_cuda is_sparse is_quantized is_leaf requires_grad grad_fn
    is_meta is_nested is_mkldnn names itemsize nbytes"""
)
_NO_ATTRIBUTE = object()


def of_tensor(value: StaticValue, name: str) -> StaticValue:
    """An attribute of a tensor, `data` among them."""
    if name == "shape":
        return shape_of(value)
    if name == "data":
        return tensor(value.rank, unit=value.unit)
    if name in _PYTHON:
        return python()
    if name in _TENSORS:
        return tensor()
    return StaticValue(Kind.PYTHON, object=TensorMethod(value, name))


def shape_of(value: StaticValue) -> StaticValue:
    """The shape of a tensor: numbers that are known for weights, sizes of the input else."""
    if value.constant:
        stored = isinstance(value.object, torch.Tensor)
        return of_object(tuple(value.object.shape)) if stored else python()
    return StaticValue(Kind.SHAPE, axis=0)


def of_other(value: StaticValue, name: str, scope: FunctionScope) -> StaticValue:
    """An attribute of anything but a tensor."""
    if value.kind in (Kind.SHAPE, Kind.SIZE):
        return StaticValue(Kind.PYTHON, object=ShapeMethod(value, name))
    if value.object is NOTHING:
        return unknown()
    if isinstance(value.object, Super):
        return _of_super(value.object, name)
    if isinstance(value.object, nn.Module):
        return _of_module(value.object, name, scope)
    return _of_object(value.object, name)


def _of_module(module: nn.Module, name: str, scope: FunctionScope) -> StaticValue:
    if name == "training":
        return of_object(False)  # exports are made in eval mode
    for own in (module.__dict__, module._parameters, module._buffers, module._modules):
        if name in own:
            return of_object(own[name])
    found = inspect.getattr_static(type(module), name, _NO_ATTRIBUTE)
    if isinstance(found, property) and found.fget is not None:
        return scope.walk.follow(found.fget, Arguments((of_object(module),)), scope)
    return _bound(found, module)


def _of_super(parent: Super, name: str) -> StaticValue:
    classes = type(parent.owner).__mro__
    behind = classes[classes.index(parent.after) + 1 :] if parent.after in classes else ()
    for cls in behind:
        if name in vars(cls):
            return _bound(vars(cls)[name], parent.owner)
    return unknown()


def _bound(found: Any, owner: Any) -> StaticValue:
    if found is _NO_ATTRIBUTE:
        return unknown()
    if isinstance(found, staticmethod):
        return of_object(found.__func__)
    if isinstance(found, classmethod):
        return of_object(types.MethodType(found.__func__, type(owner)))
    if isinstance(found, types.FunctionType) or python_function(found) is not None:
        return of_object(types.MethodType(found, owner))
    return of_object(found) if not hasattr(type(found), "__get__") else unknown()


def _of_object(thing: Any, name: str) -> StaticValue:
    if isinstance(thing, types.ModuleType | type):
        try:
            return of_object(getattr(thing, name))
        except Exception:  # modules may load what is missing
            return unknown()
    found = inspect.getattr_static(thing, name, _NO_ATTRIBUTE)
    if isinstance(found, types.MemberDescriptorType):
        return of_object(getattr(thing, name, None))
    if isinstance(found, property):
        return python()
    if isinstance(found, types.MethodDescriptorType | types.BuiltinMethodType):
        return of_object(getattr(thing, name))
    return _bound(found, thing)
