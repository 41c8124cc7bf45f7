import pytest

from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.matrix import matrix_profile
from hybridep.topology import Cluster

ROWS = ("a,b,1,20", "b,a,2,20", "a,c,4,10", "c,a,4,10", "b,c,8,30", "c,b,8,30")


def csv_file(tmp_path, *rows):
    path = tmp_path / "wan.csv"
    path.write_text("\n".join(["src,dst,gbps,rtt_ms", *rows]) + "\n")
    return path


def test_a_matrix_becomes_a_cluster(tmp_path):
    cluster = build(Cluster, matrix_profile(csv_file(tmp_path, *ROWS)), "wan")
    assert cluster.sizes == (3, 8)
    assert [site.name for site in cluster.sites] == ["a", "b", "c"]
    assert cluster.sites[0].up == pytest.approx(0.5e9)
    assert cluster.sites[0].down == pytest.approx(0.5e9)
    assert cluster.latency_s(0, 8) == pytest.approx(0.01)
    assert cluster.link_table[cluster.path(8, 0)[2]].bandwidth_bytes_per_s == pytest.approx(0.25e9)
    assert cluster.link_table[cluster.path(16, 0)[2]].bandwidth_bytes_per_s == pytest.approx(0.5e9)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,b,-1,20"], r"wan.csv:2: gbps: must be a number above zero \(found '-1'\)"),
        (["a,b,1,20", "a,c,x,20"], r"wan.csv:3: gbps"),
        (["a,b,1,-3"], "rtt_ms"),
        (["a,b,1,-0.5"], r"rtt_ms: must be a number at least zero \(found '-0.5'\)"),
        (["a,b,1,20", "a,b,1,20"], "given before"),
        (["a,a,1,20"], "loop"),
        (["a,b,1,20", "a,c,1,20"], "no row for b -> c"),
        (list(ROWS[:-1]), "b -> c has a row and the reverse has none; give all pairs both ways, or each once"),
        ([], "needs the columns"),
    ],
)
def test_a_bad_matrix_names_the_line(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        matrix_profile(csv_file(tmp_path, *rows))


def test_each_pair_once_holds_both_ways(tmp_path):
    found = matrix_profile(csv_file(tmp_path, *ROWS[::2]))
    rates = {(link["src"], link["dst"]): link["bandwidth"] for link in found["links"]}
    assert len(rates) == 6 and all(rates[pair] == rates[pair[::-1]] for pair in rates)
