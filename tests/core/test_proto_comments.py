"""The wire contract is documented: every service, rpc, message, field, enum and value has a comment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parents[2] / "proto"
PROTOS = sorted(ROOT.glob("specsplit/v1/*.proto"))

# Field numbers in descriptor.proto, by which comments are found.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED, NESTED_ENUM, ONEOF = 2, 3, 4, 8
VALUE = METHOD = 2


def elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path and name of everything that must be explained."""
    for i, message in enumerate(file.message_type):
        yield from message_elements(message, (MESSAGE, i))
    for i, enum in enumerate(file.enum_type):
        yield (ENUM, i), enum.name
        yield from (((ENUM, i, VALUE, j), value.name) for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield (SERVICE, i), service.name
        yield from (
            ((SERVICE, i, METHOD, j), f"{service.name}.{method.name}")
            for j, method in enumerate(service.method)
        )


def message_elements(message, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:  # type: ignore[no-untyped-def]
    yield path, message.name
    for j, field in enumerate(message.field):
        yield (*path, FIELD, j), f"{message.name}.{field.name}"
    for j, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):  # not the shadow of an optional field
            yield (*path, ONEOF, j), f"{message.name}.{oneof.name}"
    for j, nested in enumerate(message.nested_type):
        yield from message_elements(nested, (*path, NESTED, j))
    assert not message.enum_type, "extend this test to enums in messages"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.name)
def test_everything_has_a_comment(proto: Path, tmp_path: Path) -> None:
    output = tmp_path / "descriptors"
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{files(grpc_tools) / '_proto'}",
        "--include_source_info",
        f"--descriptor_set_out={output}",
        str(proto.relative_to(ROOT)),
    ]
    assert protoc.main(arguments) == 0
    (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
    comments = {
        tuple(location.path): location.leading_comments.strip() + location.trailing_comments.strip()
        for location in file.source_code_info.location
    }
    assert [name for path, name in elements(file) if not comments.get(path)] == []
    assert list(elements(file))


def test_all_protos_are_seen() -> None:
    assert {"common.proto", "drafter.proto", "gateway.proto", "verifier.proto"} <= {p.name for p in PROTOS}
