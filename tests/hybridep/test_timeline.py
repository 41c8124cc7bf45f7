import json

from hybridep.timeline import Span, write_chrome_trace


def test_spans_become_complete_events_in_microseconds(tmp_path):
    spans = [
        Span(name="gather", category="expert_gather", process="dc0", thread="up", start_s=0.5, duration_s=0.25),
        Span(name="matmul", category="compute", process="dc1", thread="compute", start_s=0.0, duration_s=1.0),
    ]
    write_chrome_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [("gather", 5e5, 2.5e5), ("matmul", 0.0, 1e6)]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in complete] == ["dc0", "dc1"]
