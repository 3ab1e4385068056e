"""Functions compiled for the processor at hand while the program runs: written in Python, run on torch's threads.

A `Writer` writes one function. Its integers (`Int`) and places in memory (`Place`) take part in arithmetic as if they
were numbers and pointers; what a `with writer.loop(...)` holds is written once.

    writer = Writer("scale", arguments=("values", "count"), width=8)
    values = writer.place("values")
    with writer.loop(0, writer.argument("count"), writer.width) as i:
        (values + i).store(writer.builder.fmul((values + i).load(), two))
    scale = writer.compile()
    scale(1, values=tensor.data_ptr(), count=tensor.numel())

Needs llvmlite (`pip install "optimus_cc_ext[cpu]"`), an x86-64 processor with AVX2, and a torch that runs on GNU's
OpenMP or one that answers to its name: `is_there`.
"""

from __future__ import annotations

import ctypes
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["Compiled", "Int", "Place", "Writer", "is_there", "vector_registers"]

_OLDEST = 0, 45
"""llvmlite whose pointers have no type of what they point to."""


@cache
def is_there() -> bool:
    """Whether this machine compiles, and runs what it has compiled on torch's own threads."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    try:
        version = metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        return False
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return False
    try:
        return _trial() == 2.0
    except Exception as error:  # of a library that is not needed for anything else
        warnings.warn(f"llvmlite {version} is installed, but compiles nothing here: {error}", stacklevel=2)
        return False


def _trial() -> float:
    writer = Writer("trial", ("value",), width=8)
    value = writer.place("value", double=True)
    with writer.when(writer.is_less(writer.thread, 1)):
        value.put(writer.builder.fadd(value.get(), writer.real(1.0)))
    number = ctypes.c_double(1.0)
    writer.compile()(1, value=ctypes.addressof(number))
    return number.value


def vector_registers(width: int) -> int:
    """How many registers hold vectors of `width` fp32 values on this processor; 0: none does."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return 32 if width in (8, 16) else 0
    return 16 if width == 8 else 0


@cache
def _openmp() -> ctypes.CDLL:
    # The dynamic linker finds in it what torch's own calls find: a second OpenMP would have threads of its own, and the
    # two would wait for the next piece of work on each other's cores.
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Int:
    """A 64-bit integer that the function will have when it runs."""

    def __init__(self, writer: Writer, value: Any) -> None:
        self._writer, self.value = writer, value

    def __add__(self, other: Int | int) -> Int:
        return self._with(self._writer.builder.add, other)

    def __sub__(self, other: Int | int) -> Int:
        return self._with(self._writer.builder.sub, other)

    def __mul__(self, other: Int | int) -> Int:
        return self._with(self._writer.builder.mul, other)

    def __floordiv__(self, other: Int | int) -> Int:
        return self._with(self._writer.builder.udiv, other)

    def __mod__(self, other: Int | int) -> Int:
        return self._with(self._writer.builder.urem, other)

    def at_most(self, other: Int | int) -> Int:
        """The smaller of the two."""
        limit = self._writer.integer(other)
        smaller = self._writer.builder.icmp_unsigned("<", self.value, limit.value)
        return Int(self._writer, self._writer.builder.select(smaller, self.value, limit.value))

    def _with(self, operation: Any, other: Int | int) -> Int:
        return Int(self._writer, operation(self.value, self._writer.integer(other).value))


class Place:
    """Where values lie one behind the other in memory: fp32, or fp64."""

    def __init__(self, writer: Writer, pointer: Any, element: Any) -> None:
        self._writer, self._pointer, self._element = writer, pointer, element

    def __add__(self, values: Int | int) -> Place:
        moved = self._writer.builder.gep(
            self._pointer, [self._writer.integer(values).value], source_etype=self._element
        )
        return Place(self._writer, moved, self._element)

    def integer(self, value: Int | int) -> Int:
        """As the writer's."""
        return self._writer.integer(value)

    def get(self) -> Any:
        """The value here."""
        return self._writer.builder.load(self._pointer, typ=self._element, align=4)

    def put(self, value: Any) -> None:
        """Write one value here."""
        self._writer.builder.store(value, self._pointer, align=4)

    def load(self) -> Any:
        """The vector that begins here."""
        return self._writer.builder.load(self._pointer, typ=self._writer.vector, align=4)

    def store(self, vector: Any) -> None:
        """Write the vector that begins here."""
        self._writer.builder.store(vector, self._pointer, align=4)

    def spread(self) -> Any:
        """The value here, in all places of a vector."""
        return self._writer.spread(self.get())


class Writer:
    """Writes one function on memory.

    Args:
        name: for tracebacks and disassemblies.
        arguments: their names; each is an address or another integer.
        width: fp32 values in a vector.
    """

    def __init__(self, name: str, arguments: Sequence[str], width: int) -> None:
        from llvmlite import binding, ir

        self._ir, self._name, self._arguments, self.width = ir, name, tuple(arguments), width
        self._module = ir.Module(name)
        self._module.triple = binding.get_default_triple()
        self.single, self.double = ir.FloatType(), ir.DoubleType()
        self.vector = ir.VectorType(self.single, width)
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
        self._packed = function.args[0]
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._fused = self._declare(f"llvm.fma.v{width}f32", self.vector, 3)
        self._root = self._declare("llvm.sqrt.f64", self.double, 1)

    def argument(self, name: str) -> Int:
        """An argument as an integer."""
        integer = self._ir.IntType(64)
        where = self.builder.gep(
            self._packed, [self.integer(self._arguments.index(name)).value], source_etype=integer
        )  # fmt: skip
        return Int(self, self.builder.load(where, typ=integer))

    def place(self, name: str, *, double: bool = False) -> Place:
        """An argument as the address of values."""
        pointer = self.builder.inttoptr(self.argument(name).value, self._ir.PointerType())
        return Place(self, pointer, self.double if double else self.single)

    def own(self, values: int, *, double: bool = False) -> Place:
        """Memory for a few values, on the stack of each thread."""
        element = self.double if double else self.single
        return Place(self, self._on_stack(element, values), element)

    def own_vector(self) -> Place:
        """A place for a vector, in a register where there is one."""
        return Place(self, self._on_stack(self.vector, 1), self.single)

    def integer(self, value: Int | int) -> Int:
        """A constant, or what already is an integer of the function."""
        return value if isinstance(value, Int) else Int(self, self._ir.Constant(self._ir.IntType(64), value))

    def real(self, value: float) -> Any:
        """An fp64 constant."""
        return self._ir.Constant(self.double, value)

    @property
    def zeros(self) -> Any:
        """A vector."""
        return self._ir.Constant(self.vector, [0.0] * self.width)

    def spread(self, value: Any) -> Any:
        """A vector of one value."""
        index = self._ir.IntType(32)
        empty = self._ir.Constant(self.vector, self._ir.Undefined)
        one = self.builder.insert_element(empty, value, self._ir.Constant(index, 0))
        first = self._ir.Constant(self._ir.VectorType(index, self.width), [0] * self.width)
        return self.builder.shuffle_vector(one, empty, first)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, rounded once, for vectors."""
        return self.builder.call(self._fused, [a, b, c])

    def root(self, value: Any) -> Any:
        """Of an fp64 value; NaN where it is negative."""
        return self.builder.call(self._root, [value])

    @property
    def thread(self) -> Int:
        """Which of the threads runs this."""
        return self._asked("omp_get_thread_num")

    @property
    def threads(self) -> Int:
        """How many do."""
        return self._asked("omp_get_num_threads")

    def share(self, pieces: Int | int) -> tuple[Int, Int]:
        """The first of this thread's pieces of a work, and the first of the next one's."""
        pieces, thread, threads = self.integer(pieces), self.thread, self.threads
        return pieces * thread // threads, pieces * (thread + 1) // threads

    @contextmanager
    def loop(self, first: Int | int, end: Int | int, step: Int | int = 1) -> Iterator[Int]:
        """For index = first, first + step, ... below end, what is written in the `with` statement."""
        first, end, step = (self.integer(value) for value in (first, end, step))
        builder, before = self.builder, self.builder.block
        head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(first.value.type)
        index.add_incoming(first.value, before)
        builder.cbranch(builder.icmp_signed("<", index, end.value), body, after)
        builder.position_at_end(body)
        yield Int(self, index)
        index.add_incoming(builder.add(index, step.value), builder.block)
        builder.branch(head)
        builder.position_at_end(after)

    def is_less(self, one: Int, other: Int | int) -> Any:
        """A condition."""
        return self.builder.icmp_unsigned("<", one.value, self.integer(other).value)

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """What is written in the `with` statement, if the condition holds."""
        with self.builder.if_then(condition):
            yield

    def either(self, condition: Any) -> Any:
        """Two contexts: for what is done if the condition holds, and for what if not."""
        return self.builder.if_else(condition)

    def compile(self) -> Compiled:
        """The finished function."""
        self.builder.ret_void()
        return Compiled(str(self._module), self._name, self._arguments)

    def _on_stack(self, kind: Any, count: int) -> Any:
        with self.builder.goto_entry_block():
            pointer = self.builder.alloca(kind, count)
        pointer.type = self._ir.PointerType()  # llvmlite's own is for values of `kind` alone
        return pointer

    def _declare(self, name: str, of: Any, operands: int) -> Any:
        return self._ir.Function(self._module, self._ir.FunctionType(of, [of] * operands), name)

    def _asked(self, name: str) -> Int:
        kind = self._ir.FunctionType(self._ir.IntType(32), [])
        address = self.integer(_address(getattr(_openmp(), name))).value
        function = self.builder.inttoptr(address, kind.as_pointer())
        return Int(self, self.builder.zext(self.builder.call(function, []), self._ir.IntType(64)))


class Compiled:
    """A function of addresses and integers, which torch's threads run.

    Args:
        text: the module in LLVM's language.
        name: of its function.
        arguments: their names, in order.
    """

    def __init__(self, text: str, name: str, arguments: Sequence[str]) -> None:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        module = binding.parse_assembly(text)
        module.verify()
        # Vectors of 512 bits stay whole, also on processors for which LLVM would rather take halves.
        features = f"{binding.get_host_cpu_features().flatten()},-prefer-256-bit"
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True
        )
        options = binding.create_pipeline_tuning_options(speed_level=2)
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        self._engine = binding.create_mcjit_compiler(module, machine)  # the code lives as long as it does
        self._engine.finalize_object()
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.get_function_address(name))
        self._arguments, self._packed = tuple(arguments), ctypes.c_int64 * len(arguments)

    def __call__(self, threads: int, **arguments: int) -> None:
        """Let `threads` of torch's threads run it, each once; back when all are done."""
        packed = self._packed(*(arguments[name] for name in self._arguments))
        if threads == 1:  # without a team: OpenMP would ask the other threads to wait for the next one anew
            self._function(packed)
        else:
            _openmp().GOMP_parallel(self._function, packed, threads, 0)
