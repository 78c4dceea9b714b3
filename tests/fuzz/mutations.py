"""Random changes to JSON trees, tensor tables, ONNX graphs, Jinja templates and bytes; each returns a description."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import onnx

Path = tuple[str | int, ...]

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 31, 64, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**400, -(2**63), 0.5,
    1.5, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "\0", "\ud800", "../x", "/etc/hostname", "é\n\x1b[31m",
    "x" * 10_000, [], [[]], [None], {}, {"a": {}}, [0] * 1000,
)  # fmt: skip


def paths(node: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of all nodes of a JSON tree; in long lists and large objects, only those of the first elements."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    for key, value in items[:40]:
        yield (*at, key)
        yield from paths(value, (*at, key))


def change_json(text: str, rng: random.Random) -> tuple[str, str]:
    """Make one to three changes to a JSON text; returns the new text and a description."""
    tree, said = json.loads(text), []
    places = list(paths(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.choice(places)
        try:
            parent = tree
            for key in place[:-1]:
                parent = parent[key]
            said.append(f"{place}: {_change(parent, place[-1], tree, rng)}")
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed this node
    changed = json.dumps(tree)
    if rng.random() < 0.05:
        changed, said = "[" * 50_000 + changed, [*said, "nested"]
    return changed, "; ".join(said)


def change_configuration(text: str, rng: random.Random) -> tuple[str, str]:
    """Make one or two changes to the model configurations in a `bundle.json`."""
    tree, said = json.loads(text), []
    for _ in range(rng.choice((1, 1, 2))):
        drafters = [each for each in (tree["drafter"], *tree["heads"]) if each]
        model = rng.choice([tree["target"], tree["target"], *drafters])
        *above, key = rng.choice(list(paths(model)))
        parent = model
        for each in above:
            parent = parent[each]
        said.append(f"{(*above, key)}: {_change(parent, key, tree, rng)}")
    return json.dumps(tree), "; ".join(said)


def change_table(text: str, rng: random.Random) -> tuple[str, str]:
    """Make one or two changes to the tensor tables in a `bundle.json`: change a tensor or its scales, or swap two."""
    tree, said = json.loads(text), []
    for _ in range(rng.choice((1, 1, 2))):
        table = rng.choice(list(tree["tensors"].values()))["tensors"]
        name, other = rng.choice(list(table)), rng.choice(list(table))
        tensor, kind = table[name], rng.randrange(6)
        part = tensor.get(rng.choice(("scales", "minimums")), tensor) if kind < 2 else tensor
        if kind == 5:
            alike = [each for each in table if table[each]["shape"] == tensor["shape"]]
            other = rng.choice((other, rng.choice(alike)))
            table[name], table[other] = table[other], tensor
            said.append(f"{name} exchanged with {other}")
            continue
        key = rng.choice([*part, "shape", "format", "block", "input_step", "scales", "minimums"])
        part.setdefault(key, 0)
        if kind == 4 and "offset" in table[other]:
            part["offset"] = table[other]["offset"]
            said.append(f"{name} where {other} lies")
        elif key == "shape" and isinstance(part[key], list) and rng.random() < 0.5:
            part[key] = rng.choice((part[key][::-1], [*part[key], 1], [size * 2 for size in part[key]], [-1], [0, 0]))
            said.append(f"{name}.shape: {part[key]}")
        elif key == "format" and rng.random() < 0.5:
            part[key] = rng.choice(("int2", "int4", "int4-table", "mxfp4", "int8", "bfloat16", "float32", "int64"))
            said.append(f"{name}.format: {part[key]}")
        else:
            said.append(f"{name}.{key}: {_change(part, key, tree, rng)}")
    return json.dumps(tree), "; ".join(said)


def _change(parent: Any, key: Any, tree: Any, rng: random.Random) -> str:
    kind, old = rng.random(), parent[key]
    if kind < 0.1:
        del parent[key]
        return "deleted"
    if kind < 0.3 and isinstance(old, int | float):
        parent[key] = rng.choice((old + 1, old - 1, old * 2, old // 2 if isinstance(old, int) else old / 2, -old))
    elif kind < 0.4 and isinstance(parent, dict):
        other = rng.choice(list(parent))
        parent[key], parent[other] = parent[other], parent[key]
        return f"exchanged with {other!r:.30}"
    elif kind < 0.45 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), old)
    else:
        parent[key] = rng.choice(HOSTILE)
    return f"{old!r:.30} -> {parent[key]!r:.30}"


def change_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip, remove or repeat bytes, or replace them by a number that is often a limit."""
    data = bytearray(content)
    said = []
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, kind = rng.randrange(len(data) or 1), rng.randrange(5)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice((1, 4, 100, len(data)))]
        elif kind == 2:
            data[at:at] = data[at : at + rng.choice((1, 16, 1000))]
        else:
            data[at : at + 4] = rng.choice((0, 1, 0x7F, 0xFFFFFFFF, 0x7FC00000, 0x80000000)).to_bytes(4, "little")
        said.append(f"bytes {at}: {kind}")
    return bytes(data), "; ".join(said)


def change_values(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change some bytes of a weights file, keeping its size."""
    data = bytearray(content)
    at, count = rng.randrange(len(data)), rng.choice((1, 4, 64, 4096))
    value = rng.choice((b"\0", b"\xff", b"\x7f\xc0\x00\x00", rng.randbytes(64)))
    patch = (value * count)[: min(count, len(data) - at)]
    data[at : at + len(patch)] = patch
    return bytes(data), f"{len(patch)} bytes at {at}: {value[:4].hex()}"


TEMPLATE_PARTS = (
    "{{ messages }}", "{% for a in range(99999) %}{% for b in range(99999) %}", "{% endfor %}", "{{ 1/0 }}",
    "{{ 'x' * 10**9 }}", "{{ ''.__class__ }}", "{{ raise_exception('no\nway') }}", "{% macro m() %}{{ m() }}{{ m() }}",
    "{% endmacro %}", "{{ m() }}", "{% set x = x ~ x %}", "{{ x|tojson(indent=10**9) }}", "{%", "}}", "<bos>",
    "{{ '{:>{}}'.format(1, 10**9) }}", "{% include 'x' %}", "{% if", "{{ none.x.y }}", "{{ messages[9].content }}",
)  # fmt: skip


def change_text(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Insert pieces into a chat template or remove some."""
    text = content.decode("utf-8", "replace")
    said = []
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(TEMPLATE_PARTS)
        if rng.random() < 0.7:
            text = text[:at] + piece + text[at:]
            said.append(f"{piece!r} at {at}")
        else:
            text = text[:at] + text[at + rng.choice((1, 5, 50)) :]
            said.append(f"cut at {at}")
    return text.encode("utf-8", "replace"), "; ".join(said)


def change_graph(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Make one or two changes to an ONNX graph: nodes, attributes, shapes or the locations of its weights."""
    model = onnx.load_model_from_string(content)
    said = [_change_model(model, rng) for _ in range(rng.choice((1, 1, 2)))]
    return model.SerializeToString(), "; ".join(said)


def _change_model(model: onnx.ModelProto, rng: random.Random) -> str:
    rare = (_interface, _interface, _declared, _number, _nodes, _opset, _operator)
    ways = (_attribute,) * 4 + (_wire,) * 3 + (_weights,) * 4 + rare
    return rng.choice(ways)(model, rng) or _operator(model, rng)


def _attribute(model: onnx.ModelProto, rng: random.Random) -> str | None:
    node = rng.choice([node for node in model.graph.node if node.attribute])
    attribute = rng.choice(node.attribute)
    old = onnx.helper.get_attribute_value(attribute)
    _change_attribute(attribute, rng)
    return f"{node.name}.{attribute.name}: {old!r:.30} -> {str(attribute)!r:.60}"


def _wire(model: onnx.ModelProto, rng: random.Random) -> str | None:
    node, other = rng.choice(model.graph.node), rng.choice(model.graph.node)
    wires = node.input if rng.random() < 0.7 else node.output
    if not wires:
        return None
    at = rng.randrange(len(wires))
    old, wires[at] = wires[at], rng.choice((*other.output, *other.input, ""))
    return f"{node.name} wire {at}: {old} -> {wires[at]}"


def _weights(model: onnx.ModelProto, rng: random.Random) -> str | None:
    return _change_tensor(rng.choice(model.graph.initializer), rng)


def _interface(model: onnx.ModelProto, rng: random.Random) -> str | None:
    value = rng.choice((*model.graph.input, *model.graph.output))
    shape = value.type.tensor_type.shape
    if not shape.dim:
        return None
    at = rng.randrange(len(shape.dim))
    shape.dim[at].dim_value = rng.choice((0, 1, 2, 64, 2**31, 2**62))
    return f"{value.name} dimension {at}: {shape.dim[at].dim_value}"


def _declared(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """Declare the shape of a node's output."""
    name = rng.choice(rng.choice(model.graph.node).output)
    shape = [rng.choice((1, 2, 64, 192, 2**31, 2**62)) for _ in range(rng.randrange(4))]
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, rng.choice((1, 7, 9)), shape))
    return f"{name}: {shape}"


def _number(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """Change a number in a constant of the graph file itself, most often in a shape."""
    tensor = rng.choice([tensor for tensor in model.graph.initializer if tensor.data_type == 7 and tensor.raw_data])
    at = rng.randrange(len(tensor.raw_data) // 8) * 8
    number = rng.choice((-(2**63), -1, 0, 1, 2, 64, 6144, 2**20, 2**23, 2**31, 2**62))
    tensor.raw_data = tensor.raw_data[:at] + number.to_bytes(8, "little", signed=True) + tensor.raw_data[at + 8 :]
    return f"{tensor.name} at {at}: {number}"


def _nodes(model: onnx.ModelProto, rng: random.Random) -> str | None:
    at = rng.randrange(len(model.graph.node))
    if rng.random() < 0.5:
        del model.graph.node[at]
        return f"node {at} deleted"
    model.graph.node.append(model.graph.node[at])
    return f"node {at} twice"


def _opset(model: onnx.ModelProto, rng: random.Random) -> str | None:
    entry = rng.choice(model.opset_import)
    entry.version = rng.choice((0, 1, 13, 21, 22, 25, 2**31))
    return f"opset {entry.domain!r}: {entry.version}"


def _operator(model: onnx.ModelProto, rng: random.Random) -> str:
    node = rng.choice(model.graph.node)
    old, node.op_type = node.op_type, rng.choice(model.graph.node).op_type
    return f"{node.name}: {old} -> {node.op_type}"


def _change_attribute(attribute: onnx.AttributeProto, rng: random.Random) -> None:
    integers = (-1, 0, 1, 2, 4, 8, 16, 32, 64, 2**31, 2**62)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = rng.choice((attribute.i + 1, attribute.i * 2, *integers))
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice((0.0, -1.0, attribute.f * 2, float("nan"), float("inf"), 1e-30))
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = rng.choice((b"", b"none", b"tanh", b"\xff"))
    elif attribute.type == onnx.AttributeProto.INTS:
        attribute.ints.append(rng.choice(integers))
    else:
        attribute.type = onnx.AttributeProto.INT


def _change_tensor(tensor: onnx.TensorProto, rng: random.Random) -> str:
    said = f"{tensor.name} "
    if tensor.external_data and rng.random() < 0.6:
        entry = rng.choice(tensor.external_data)
        entry.value = rng.choice(
            ("", "-1", "0", "64", "4096", str(2**62), "x", "../target.onnx", "/etc/hostname", "bundle.json", "\0")
        )
        return said + f"{entry.key}: {entry.value!r}"
    if tensor.dims and rng.random() < 0.6:
        at = rng.randrange(len(tensor.dims))
        tensor.dims[at] = rng.choice((0, 1, -1, tensor.dims[at] * 2, tensor.dims[at] // 2, 2**31, 2**62))
        return said + f"dimension {at}: {tensor.dims[at]}"
    if rng.random() < 0.3:
        tensor.dims.extend([1] * 70)
        return said + "70 dimensions more"
    tensor.data_type = rng.randrange(0, 24)
    return said + f"type {tensor.data_type}"
