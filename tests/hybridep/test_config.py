import os
from pathlib import Path

import pytest
from pydantic_core import PydanticSerializationError

from hybridep.config import apply_override, build, load, read_csv, replacing, write_text, write_yaml
from hybridep.errors import ConfigError, UserError
from hybridep.run import Run
from hybridep.topology import Cluster

GOOD = """\
name: two
levels:
  - {name: dc, size: 2, bandwidth: 10 Gbps, latency: 1 ms}
  - name: gpu
    size: 4
    bandwidth: 100 Gbps
    latency: 10 us
gpu: {throughput: 100 TFLOPS, memory: 80 GiB, memory_bandwidth: 2 TB/s}
"""


def cluster_file(tmp_path, text):
    path = tmp_path / "two.yaml"
    path.write_text(text)
    return path


def test_a_good_file_loads(tmp_path):
    cluster = load(Cluster, cluster_file(tmp_path, GOOD))
    assert cluster.sizes == (2, 4)
    assert cluster.levels[0].bandwidth == 1.25e9


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("    size: 4", "    sise: 4", "two.yaml:5: levels.1.sise", "did you mean 'size'"),
        ("throughput: 100 TFLOPS", "troughput: 100 TFLOPS", "two.yaml:8: gpu.troughput", "did you mean 'throughput'"),
        ("bandwidth: 100 Gbps", "bandwidth: 100", "two.yaml:6: levels.1.bandwidth", "has no unit"),
        ("bandwidth: 100 Gbps", "bandwidth: -100 Gbps", "two.yaml:6: levels.1.bandwidth", "above zero"),
        ("bandwidth: 100 Gbps", "bandwidth: 0 Gbps", "two.yaml:6: levels.1.bandwidth", "above zero"),
        ("    size: 4", "    size: 0", "two.yaml:5: levels.1.size", "greater than or equal to 1"),
        ("    size: 4\n", "", "two.yaml:4: levels.1.size", "is missing"),
        ("    size: 4", "    size: true", "two.yaml:5: levels.1.size", "cannot be true or false"),
        ("name: two", "name: no", "two.yaml:1: name", "YAML's yes, no, on and off"),
        ("memory: 80 GiB", "memory: 80 GiB, coding: yes", "two.yaml:8: gpu.coding", "valid dictionary or instance of Speeds"),
        ("name: two", "name: [", "two.yaml", "is not YAML"),
        ("name: two", "name: 2026-13-45", "two.yaml", "is not YAML: month must be"),
        ("    size: 4", "    size: 4\n    size: 8", "two.yaml:6: levels.1.size", "is given twice"),
        ("name: two", "name: &a [*a]", "two.yaml:1: name.0", "alias inside of what it stands for"),
        ("name: two", "name: " + "[" * 995 + "]" * 995, "two.yaml", "nested too deeply"),
    ],
)
def test_a_bad_file_is_one_line_with_file_key_and_value(tmp_path, old, new, where, message):
    with pytest.raises(ConfigError) as caught:
        load(Cluster, cluster_file(tmp_path, GOOD.replace(old, new)))
    text = str(caught.value)
    assert where in text
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("key", ["every_steps", "batches"])
def test_true_is_no_number_in_what_may_be_left_out(key):
    validation = {"data": {}, "every_steps": 5, key: True}
    with pytest.raises(ConfigError, match=f"validation.{key}: cannot be true or false"):
        build(
            Run, {"name": "x", "cluster": "x", "workload": "x", "output": "x", "steps": 1, "validation": validation}, "run.yaml"
        )


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load(Cluster, tmp_path / "absent.yaml")


def test_overrides_reach_nested_keys_and_named_list_entries(tmp_path):
    cluster = load(Cluster, cluster_file(tmp_path, GOOD), ["levels.dc.bandwidth=1 Gbps", "gpu.memory=16 GiB", "levels.1.size=8"])
    assert cluster.levels[0].bandwidth == 1.25e8
    assert cluster.gpu.memory == 2.0**34
    assert cluster.sizes == (2, 8)


def test_an_alias_may_be_used_twice(tmp_path):
    text = GOOD.replace("bandwidth: 10 Gbps", "bandwidth: &fast 10 Gbps").replace("bandwidth: 100 Gbps", "bandwidth: *fast")
    assert load(Cluster, cluster_file(tmp_path, text)).levels[1].bandwidth == 1.25e9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("levels.gpu.size=0", "--set levels.gpu.size=0: levels.1.size: Input should be greater than or equal to 1"),
        (
            "levels.1={name: gpu, sise: 4}",
            "--set levels.1={name: gpu, sise: 4}: levels.1.sise: unknown key; did you mean 'size'?",
        ),
        ("gpu.memory=16", "--set gpu.memory=16: gpu.memory: "),
        ("levels.gpu.size=on", "--set levels.gpu.size=on: levels.1.size: cannot be true or false"),
    ],
)
def test_a_bad_override_is_named_and_not_a_line_of_the_file(tmp_path, override, message):
    with pytest.raises(ConfigError) as caught:
        load(Cluster, cluster_file(tmp_path, GOOD), ["name=other", override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("override", ["levels.rack.size=2", "name", "name.deep.er=2", "name=[1"])
def test_an_override_that_fits_nowhere_is_refused(override):
    with pytest.raises(UserError, match="--set"):
        apply_override({"name": "x", "levels": [{"name": "dc"}]}, override)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    path = tmp_path / "out.yaml"
    with pytest.raises(Exception, match="represent"):
        write_yaml(path, {"bad": object()})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        write_yaml(cluster_file(tmp_path, "x") / "below-a-file.yaml", {"a": 1})
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder: cannot be written \(Is a directory\)"):
        write_yaml(folder, {"a": 1})
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "two.yaml"]


def test_what_is_no_plain_file_is_written_to_and_not_replaced(tmp_path):
    # As `-o /dev/null` or `-o /dev/stdout` would be, also by who may replace devices.
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "a")
    assert os.read(reader, 10) == b"a"
    os.close(reader)
    assert pipe.is_fifo()
    write_text(link, "b")
    write_text(link, "c")
    assert link.is_symlink() and file.read_text() == "c"


@pytest.mark.parametrize("name", ["file", "/dev/null"])
def test_only_what_goes_wrong_with_a_file_is_told_of_it(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="other"), replacing(tmp_path / name):
        (tmp_path / "other").read_bytes()
    with pytest.raises(BrokenPipeError), replacing(tmp_path / name) as stream:
        stream.write(b"a")
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_device_that_takes_nothing_is_named(size):
    """Whether it is noticed at once or when the last bytes leave."""
    with pytest.raises(UserError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        write_text(Path("/dev/full"), "a" * size)


def test_a_pipe_is_written_to_from_its_beginning_to_its_end(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UserError, match=r"pipe: cannot be written \(.*not seekable"), replacing(pipe) as stream:
        stream.seek(0)
    os.close(reader)


@pytest.mark.parametrize("text", ["\ufeffa,b\n1,x y\n", "a, b\r\n1, x y\r\n", 'b,a,,\n"x y",1,,\n', "a,b\n1,x y,,\n"])
def test_rows_as_spreadsheets_write_them(tmp_path, text):
    (path := tmp_path / "rows.csv").write_bytes(text.encode())
    [(line, row)] = read_csv(path, ("a", "b"))
    assert line == 2 and (row["a"], row["b"]) == ("1", "x y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Half of 1 would be read as 0.
        ("a,b\n1,2\n\n1,0,5\n", r"rows.csv:4: has more values than there are columns \('1,0,5'\)"),
        ("a;b\n1;2\n", r"rows.csv:1: header: needs the columns a,b and at least one row \(found 'a;b'\)"),
        ("", r"rows.csv:1: .* \(it is empty\)"),
        ("a,b\n" + "1" * 140_000 + ",2\n", r"rows.csv: cannot be read \(field larger"),
    ],
)
def test_rows_that_cannot_be_meant(tmp_path, text, message):
    (path := tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_csv(path, ("a", "b"))


def test_what_is_cached_in_them_does_not_make_clusters_differ(tmp_path):
    """Arrays among it have no truth value."""
    path = cluster_file(tmp_path, GOOD)
    first, second, other = load(Cluster, path), load(Cluster, path), load(Cluster, path, ["gpu.jitter=1 ms"])
    assert first.coordinates is not second.coordinates
    assert first == second and hash(first) == hash(second)
    assert first != other and first != "two"


@pytest.mark.parametrize(
    ("raised", "told"),
    [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, SystemExit), (ZeroDivisionError, PydanticSerializationError)],
)
def test_an_interrupt_while_values_are_written_stays_one(tmp_path, monkeypatch, raised, told):
    """pydantic makes an error of it, which nothing would take for an interrupt."""
    cluster = load(Cluster, cluster_file(tmp_path, GOOD))

    def ends(*_):
        raise raised

    monkeypatch.setattr("hybridep.config.exact", ends)
    with pytest.raises(told):
        cluster.model_dump(mode="json")
