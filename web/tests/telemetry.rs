//! The exported telemetry, received over a real socket and decoded with OpenTelemetry's own Python classes.

mod common;

use common::otlp::{Collector, attributes, items, python};
use common::rings::{add_group, issue_overdue_barrier, ring};
use common::{Web, skip, wait_until};
use rcomm_recorder::model::{ReducerSums, ReducerTimes};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Serves a simulated job that gets stuck, exported to `endpoint`; returns once the job is read.
fn start(endpoint: &str, more: &[(&str, &str)]) -> Web {
    let args = ["--demo", "stuck", "--no-token", "--refresh", "200ms"];
    let web = Web::start_with(&args, |command| {
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20secret")
            .env("OTEL_METRIC_EXPORT_INTERVAL", "500")
            .env("OTEL_RESOURCE_ATTRIBUTES", "k8s.namespace.name=lab")
            .envs(more.iter().copied());
    });
    web.wait_until_ready();
    web
}

#[test]
fn opentelemetry_decodes_the_spans_metrics_and_logs() {
    let Some(python) = python() else { return };
    let collector = Collector::start();
    let web = start(&format!("http://{}", collector.address), &[]);
    wait_until("the job to be stuck, and all of it to be exported", || {
        let stuck = web.get("/api/v1/report", &[]).json()["verdict"] == "stuck";
        (stuck && collector.files("logs") >= 2 && collector.files("metrics") >= 2).then_some(())
    });
    let before = collector.taken.load(Relaxed);
    wait_until("one more round", || {
        (collector.taken.load(Relaxed) > before + 1).then_some(())
    });
    let decoded = collector.decoded(&python);

    // The spans that all ranks export of one all-reduce share a trace.
    let mut traces: HashMap<&str, BTreeSet<String>> = HashMap::new();
    let mut pending = 0;
    for (resource, span) in items(&decoded["traces"], ["resourceSpans", "scopeSpans", "spans"]) {
        let (operation, process) = (attributes(span), attributes(resource));
        assert_eq!(process["service.name"], "demo-stuck");
        assert_eq!(process["k8s.namespace.name"], "lab");
        let rank = operation["rcomm.rank"]
            .as_str()
            .expect("int64 is text in JSON")
            .to_owned();
        assert_eq!(process["service.instance.id"], format!("rank-{rank}"));
        if operation["rcomm.group.id"] == "dp_5" {
            let trace = span["traceId"].as_str().expect("the id is a text");
            let key = format!("{} {rank}", operation["rcomm.seq"]);
            traces.entry(trace).or_default().insert(key);
        }
        pending += usize::from(span["status"]["code"] == "STATUS_CODE_ERROR");
        let ns = |key: &str| span[key].as_str().and_then(|ns| ns.parse::<u64>().ok());
        assert!(ns("startTimeUnixNano") < ns("endTimeUnixNano"), "{span}");
    }
    assert!(traces.len() > 5, "{traces:?}");
    // dp_5 consists of ranks 5 and 13; each trace belongs to one sequence number.
    assert!(
        traces.values().filter(|spans| spans.len() == 2).count() >= traces.len() - 2,
        "{traces:?}"
    );
    assert!(pending >= 1);

    let finding = items(
        &decoded["logs"],
        ["resourceLogs", "scopeLogs", "logRecords"],
    )
    .find(|(_, record)| attributes(record).get("rcomm.finding.code") == Some(&"E101".into()));
    let (_, record) = finding.expect("the finding is exported");
    let body = record["body"]["stringValue"]
        .as_str()
        .expect("the sentence is a text");
    assert!(
        body.starts_with("rank 13 never issued all_reduce"),
        "{body}"
    );
    assert_eq!(record["severityText"], "ERROR");
    assert!(
        record["traceId"].as_str().is_some_and(|id| id.len() > 10),
        "{record}"
    );

    let exported = items(
        &decoded["metrics"],
        ["resourceMetrics", "scopeMetrics", "metrics"],
    );
    let metrics: HashMap<&str, &Value> = exported
        .filter_map(|(_, metric)| Some((metric["name"].as_str()?, metric)))
        .collect();
    let points = &metrics["rcomm.collective.duration"]["histogram"]["dataPoints"];
    let point = &points.as_array().expect("the metric has points")[0];
    let counts = point["bucketCounts"]
        .as_array()
        .expect("the point has buckets")
        .iter();
    let sum: u64 = counts
        .filter_map(|count| count.as_str()?.parse::<u64>().ok())
        .sum();
    assert_eq!(point["count"], sum.to_string());
    assert_eq!(metrics["rcomm.collective.duration"]["unit"], "s");
    assert_eq!(metrics["rcomm.collectives"]["sum"]["isMonotonic"], true);
    assert_eq!(web.sample("rcomm_otel_spans_dropped_total"), 0.0);
}

/// The records of a stuck job do not change, so there is no second snapshot to wait for: the first is exported whole.
#[test]
fn a_job_that_is_stuck_already_is_exported_at_once() {
    let Some(python) = python() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let rings = [0, 1].map(|rank| ring(directory.path(), "stuck", rank));
    issue_overdue_barrier(&rings[0]);
    let collector = Collector::start();
    let ring_dir = directory.path().to_str().expect("the path is UTF-8");
    let args = ["--no-token", "--ring-dir", ring_dir, "--overdue", "1us"];
    let web = Web::start_with(&args, |command| {
        let endpoint = format!("http://{}", collector.address);
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20secret");
    });
    web.wait_until_ready();
    wait_until("the verdict and the pending operation", || {
        (collector.files("logs") >= 1 && collector.files("traces") >= 1).then_some(())
    });
    let decoded = collector.decoded(&python);
    let records = items(
        &decoded["logs"],
        ["resourceLogs", "scopeLogs", "logRecords"],
    );
    let sentences: Vec<&str> = records
        .filter_map(|(_, record)| record["body"]["stringValue"].as_str())
        .collect();
    assert!(sentences.contains(&"the job is stuck"), "{sentences:?}");
    let missing = |it: &&str| it.starts_with("rank 1 never issued barrier #1");
    assert!(sentences.iter().any(missing), "{sentences:?}");
    let spans = items(&decoded["traces"], ["resourceSpans", "scopeSpans", "spans"]);
    let pending: Vec<(Value, String)> = spans
        .filter(|(_, span)| span["status"]["code"] == "STATUS_CODE_ERROR")
        .map(|(_, span)| {
            (
                attributes(span)["rcomm.rank"].clone(),
                span["name"].to_string(),
            )
        })
        .collect();
    assert_eq!(pending.len(), 1, "{pending:?}");
    assert_eq!(pending[0].0, "0", "{pending:?}");
    assert!(pending[0].1.contains("barrier"), "{pending:?}");
}

/// Each rank has had three steps of 10 ms forward, 20 ms backward, and 15 ms of communication, of which 5 ms (on rank
/// 1: 7 ms) were exposed.
#[test]
fn steps_of_reducers_are_exported_as_metrics_of_their_groups() {
    const MS: u64 = 1_000_000;
    let Some(python) = python() else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let _rings = [0, 1].map(|rank| {
        let ring = ring(directory.path(), "training", rank);
        add_group(&ring);
        let exposed_ns = (5 + 2 * u64::from(rank)) * MS;
        let times = ReducerTimes {
            step: 3,
            forward_ns: 10 * MS,
            backward_ns: 20 * MS,
            communication_ns: 15 * MS,
            exposed_ns,
            sums: ReducerSums {
                steps: 3,
                forward_ns: 30 * MS,
                backward_ns: 60 * MS,
                communication_ns: 45 * MS,
                exposed_ns: 3 * exposed_ns,
            },
            ..ReducerTimes::default()
        };
        ring.note_reducer_step(0, &times, std::iter::empty());
        ring
    });
    let collector = Collector::start();
    let ring_dir = directory.path().to_str().expect("UTF-8");
    let web = Web::start_with(&["--no-token", "--ring-dir", ring_dir], |command| {
        let endpoint = format!("http://{}", collector.address);
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20secret")
            .env("OTEL_METRIC_EXPORT_INTERVAL", "500");
    });
    web.wait_until_ready();
    wait_until("the steps of both ranks to be counted", || {
        let page = web.get("/metrics", &[]).body;
        page.contains("rcomm_reducer_steps_total{desc=\"default_pg\"} 6\n")
            .then_some(())
    });
    let before = collector.files("metrics");
    wait_until("an export after that", || {
        (collector.files("metrics") > before + 1).then_some(())
    });

    let decoded = collector.decoded(&python);
    let exported = items(
        &decoded["metrics"],
        ["resourceMetrics", "scopeMetrics", "metrics"],
    );
    // The newest export of each metric.
    let metrics: HashMap<&str, &Value> = exported
        .filter_map(|(_, metric)| Some((metric["name"].as_str()?, metric)))
        .collect();
    let points = |name: &str, kind: &str| {
        let points = metrics[name][kind]["dataPoints"].as_array();
        points.expect("points").clone()
    };
    for (name, expected) in [
        ("rcomm.reducer.step", 0.037),
        ("rcomm.reducer.exposed", 0.007),
    ] {
        let points = points(name, "gauge");
        assert_eq!(points.len(), 1, "{points:?}");
        let point_attributes = attributes(&points[0]);
        assert_eq!(point_attributes["rcomm.group.desc"], "default_pg", "{name}");
        assert_eq!(points[0]["asDouble"], expected, "{name}");
        assert_eq!(metrics[name]["unit"], "s");
    }
    let steps = &metrics["rcomm.reducer.steps"];
    assert_eq!(steps["sum"]["isMonotonic"], true, "{steps}");
    assert_eq!(points("rcomm.reducer.steps", "sum")[0]["asInt"], "6");
    let time = points("rcomm.reducer.time", "sum");
    let parts: BTreeSet<(String, String)> = time
        .iter()
        .map(|point| {
            let part = attributes(point)["rcomm.reducer.part"].clone();
            let ms = point["asDouble"].as_f64().expect("seconds") * 1e3;
            (
                part.as_str().expect("a name").to_owned(),
                format!("{ms:.3}"),
            )
        })
        .collect();
    let expected = [
        ("backward", "120.000"),
        ("communication", "90.000"),
        ("exposed", "36.000"),
        ("forward", "60.000"),
    ];
    let expected = expected.map(|(part, ms)| (part.to_owned(), ms.to_owned()));
    assert_eq!(parts, BTreeSet::from(expected));
}

/// A real OTLP collector, stopped when dropped.
struct Rotel(Child);

impl Drop for Rotel {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program of rotel, an OTLP collector from PyPI, which pip installs if it is missing; `None`, with the reason
/// printed, if there is none.
fn rotel() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rotel-python");
    let place = folder.to_str()?;
    let run = |program: &Path, args: &[&str]| {
        let output = Command::new(program).args(args).output();
        output.is_ok_and(|output| output.status.success())
    };
    let find = "import rotel, pathlib; print(pathlib.Path(rotel.__file__).parent / 'rotel-agent')";
    let python = folder.join("bin/python");
    let found = || {
        let output = Command::new(&python).args(["-c", find]).output().ok()?;
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        (output.status.success() && run(&path, &["--version"])).then_some(path)
    };
    let install = ["-m", "pip", "install", "--quiet", "rotel==0.0.1a15"];
    let path = found().or_else(|| {
        let made = run(Path::new("python3"), &["-m", "venv", place]) && run(&python, &install);
        found().filter(|_| made)
    });
    if path.is_none() {
        skip("rotel does not run here, and pip cannot install one that does");
    }
    path
}

/// A port without a listener, below the usual range of ephemeral ports. It is one of sixteen ports that follow from the
/// process id: test processes that run at the same time rarely take the same one.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut ports = (0..16).map(|_| {
        let nth = NEXT.fetch_add(1, Relaxed) % 16;
        10_000 + ((std::process::id() * 16 + nth) % 20_000) as u16
    });
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(free).expect("one of sixteen ports to be free")
}

#[test]
fn a_real_collector_accepts_and_forwards_all_signals() {
    let (Some(python), Some(rotel)) = (python(), rotel()) else {
        return;
    };
    let receiver = Collector::start();
    let (http, grpc) = (free_port(), free_port());
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let _rotel = Rotel(
        Command::new(rotel)
            .arg("start")
            .args(["--exporter", "otlp", "--otlp-exporter-protocol", "http"])
            .args(["--otlp-exporter-custom-headers", "api-key=a secret"])
            .args(["--otlp-exporter-compression", "none"])
            .args([
                "--otlp-exporter-endpoint",
                &format!("http://{}", receiver.address),
            ])
            .args(["--otlp-http-endpoint", &format!("127.0.0.1:{http}")])
            .args(["--otlp-grpc-endpoint", &format!("127.0.0.1:{grpc}")])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program was found before"),
    );
    wait_until("the collector to listen", || {
        std::net::TcpStream::connect(("127.0.0.1", http)).ok()
    });
    let web = start(&format!("http://127.0.0.1:{http}"), &[]);
    wait_until("all three kinds to be passed on, and the verdict", || {
        let kinds = ["traces", "metrics", "logs"];
        let all = kinds.iter().all(|kind| receiver.files(kind) > 0);
        (all && web.sample("rcomm_otel_logs_sent_total") >= 2.0).then_some(())
    });
    let found = wait_until("the finding", || {
        let decoded = receiver.decoded(&python);
        let path = ["resourceLogs", "scopeLogs", "logRecords"];
        items(&decoded["logs"], path).find_map(|(_, record)| {
            let record_attributes = attributes(record);
            let code = record_attributes.get("rcomm.finding.code")?;
            (code == "E101").then(|| record["body"]["stringValue"].clone())
        })
    });
    let found = found.as_str().expect("the sentence is a text");
    assert!(
        found.starts_with("rank 13 never issued all_reduce"),
        "{found}"
    );
    for kind in ["spans", "logs", "metrics"] {
        let dropped = web.sample(&format!("rcomm_otel_{kind}_dropped_total"));
        assert_eq!(dropped, 0.0, "{kind}");
    }
}

#[test]
fn an_unusable_collector_causes_only_dropped_items() {
    // One OTLP collector refuses connections; the other accepts them and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let silent_url = format!(
        "http://{}",
        silent.local_addr().expect("the socket is bound")
    );
    for endpoint in ["http://127.0.0.1:9", silent_url.as_str()] {
        let mut web = start(endpoint, &[("OTEL_EXPORTER_OTLP_TIMEOUT", "200")]);
        wait_until("something to be dropped of each kind", || {
            let kinds = ["spans", "logs", "metrics"];
            let dropped = |kind| web.sample(&format!("rcomm_otel_{kind}_dropped_total"));
            kinds
                .into_iter()
                .all(|kind| dropped(kind) > 0.0)
                .then_some(())
        });
        assert_eq!(web.sample("rcomm_otel_spans_sent_total"), 0.0);
        assert!(web.stop().success());
    }
}

#[test]
fn an_invalid_variable_is_named_at_start() {
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-web"))
        .args(["--listen", "127.0.0.1:0", "--demo", "healthy"])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        .output()
        .expect("the program of this package starts");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("OTEL_EXPORTER_OTLP_PROTOCOL is \"grpc\""),
        "{text}"
    );
}
