//! What goes out to OpenTelemetry, received over a real socket and decoded with OpenTelemetry's own Python
//! classes.
//!
//! `RCOMM_TEST_OTEL_PYTHON` names a Python that has `opentelemetry-proto`; without it one is made in the
//! target folder, if pip can.

mod common;

use common::{Web, skip, wait_until};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Takes every request, and leaves its body in a folder.
struct Collector {
    address: SocketAddr,
    folder: tempfile::TempDir,
    taken: Arc<AtomicUsize>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let collector = Self {
            address: listener.local_addr().expect("bound"),
            folder: tempfile::tempdir().expect("a directory"),
            taken: Arc::default(),
        };
        let (folder, taken) = (collector.folder.path().to_owned(), collector.taken.clone());
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (folder, taken) = (folder.clone(), taken.clone());
                std::thread::spawn(move || while receive(&stream, &folder, &taken).is_some() {});
            }
        });
        collector
    }

    fn files(&self, signal: &str) -> usize {
        let entries = std::fs::read_dir(self.folder.path())
            .expect("readable")
            .flatten();
        let named = entries.filter(|it| it.file_name().to_string_lossy().starts_with(signal));
        named.count()
    }
}

/// One request of a connection that may carry more.
fn receive(stream: &TcpStream, folder: &Path, taken: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    let right = headers
        .get("content-type")
        .is_some_and(|it| it == "application/x-protobuf")
        && headers.get("api-key").is_some_and(|it| it == "a secret");
    let signal = path.strip_prefix("/v1/").filter(|_| right);
    let answer = match signal {
        Some(signal) => {
            let number = taken.fetch_add(1, Relaxed);
            let part = folder.join(format!("part.{number}"));
            std::fs::write(&part, &body).ok()?;
            std::fs::rename(part, folder.join(format!("{signal}.{number:06}"))).ok()?;
            "200 OK"
        }
        None => "400 Bad Request",
    };
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n").ok()
}

/// A Python that knows OpenTelemetry's messages; says so if there is none.
fn python() -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("RCOMM_TEST_OTEL_PYTHON") {
        return Some(python.into());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("otel-python");
    let python = folder.join("bin/python");
    let run = |program: &Path, args: &[&str]| {
        let output = Command::new(program).args(args).output();
        output.is_ok_and(|output| output.status.success())
    };
    let has = || {
        run(
            &python,
            &["-c", "import opentelemetry.proto.trace.v1.trace_pb2"],
        )
    };
    let place = folder.to_str()?;
    if has()
        || (run(Path::new("python3"), &["-m", "venv", place])
            && run(
                &python,
                &[
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "opentelemetry-proto==1.37.0",
                ],
            )
            && has())
    {
        return Some(python);
    }
    skip("there is no Python with opentelemetry-proto, and pip cannot install it");
    None
}

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

/// Attributes as a map of plain values.
fn attributes(of: &Value) -> HashMap<String, Value> {
    let list = of["attributes"].as_array().cloned().unwrap_or_default();
    let pair = |it: &Value| {
        let value = it["value"]
            .as_object()
            .and_then(|value| value.values().next());
        Some((it["key"].as_str()?.to_owned(), value?.clone()))
    };
    list.iter().filter_map(pair).collect()
}

fn each<'a>(
    requests: &'a Value,
    path: [&'a str; 3],
) -> impl Iterator<Item = (&'a Value, &'a Value)> {
    let list = |value: &'a Value| {
        value
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
    };
    let resources = list(requests).flat_map(move |request| list(&request[path[0]]));
    resources.flat_map(move |resource| {
        let scopes = list(&resource[path[1]]);
        let items = scopes.flat_map(move |scope| list(&scope[path[2]]));
        items.map(move |item| (&resource["resource"], item))
    })
}

#[test]
fn spans_metrics_and_logs_are_what_opentelemetry_reads() {
    let Some(python) = python() else { return };
    let collector = Collector::start();
    let web = start(&format!("http://{}", collector.address), &[]);
    wait_until("the job to be stuck, and all of it to be told", || {
        let stuck = web.get("/api/v1/report", &[]).json()["verdict"] == "stuck";
        (stuck && collector.files("logs") >= 2 && collector.files("metrics") >= 2).then_some(())
    });
    let before = collector.taken.load(Relaxed);
    wait_until("one more round", || {
        (collector.taken.load(Relaxed) > before + 1).then_some(())
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/decode_otlp.py");
    let output = Command::new(python)
        .arg(script)
        .arg(collector.folder.path())
        .output()
        .expect("Python runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    let decoded: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"));

    // All ranks' spans of one all-reduce meet in one trace.
    let mut traces: HashMap<&str, BTreeSet<String>> = HashMap::new();
    let mut pending = 0;
    for (resource, span) in each(&decoded["traces"], ["resourceSpans", "scopeSpans", "spans"]) {
        let (about, of) = (attributes(span), attributes(resource));
        assert_eq!(of["service.name"], "demo-stuck");
        assert_eq!(of["k8s.namespace.name"], "lab");
        let rank = about["rcomm.rank"]
            .as_str()
            .expect("int64 is text in JSON")
            .to_owned();
        assert_eq!(of["service.instance.id"], format!("rank-{rank}"));
        if about["rcomm.group.id"] == "dp_5" {
            let trace = span["traceId"].as_str().expect("an id");
            let key = format!("{} {rank}", about["rcomm.seq"]);
            traces.entry(trace).or_default().insert(key);
        }
        pending += usize::from(span["status"]["code"] == "STATUS_CODE_ERROR");
        let ns = |key: &str| span[key].as_str().and_then(|ns| ns.parse::<u64>().ok());
        assert!(ns("startTimeUnixNano") < ns("endTimeUnixNano"), "{span}");
    }
    assert!(traces.len() > 5, "{traces:?}");
    // dp_5 is of ranks 5 and 13; each trace is of one sequence number.
    assert!(
        traces.values().filter(|spans| spans.len() == 2).count() >= traces.len() - 2,
        "{traces:?}"
    );
    assert!(pending >= 1);

    let finding = each(
        &decoded["logs"],
        ["resourceLogs", "scopeLogs", "logRecords"],
    )
    .find(|(_, record)| attributes(record).get("rcomm.finding.code") == Some(&"E101".into()));
    let (_, record) = finding.expect("the finding is told");
    let body = record["body"]["stringValue"].as_str().expect("a sentence");
    assert!(
        body.starts_with("rank 13 never issued all_reduce"),
        "{body}"
    );
    assert_eq!(record["severityText"], "ERROR");
    assert!(
        record["traceId"].as_str().is_some_and(|id| id.len() > 10),
        "{record}"
    );

    let all = each(
        &decoded["metrics"],
        ["resourceMetrics", "scopeMetrics", "metrics"],
    );
    let metrics: HashMap<&str, &Value> = all
        .filter_map(|(_, m)| Some((m["name"].as_str()?, m)))
        .collect();
    let points = &metrics["rcomm.collective.duration"]["histogram"]["dataPoints"];
    let point = &points.as_array().expect("points")[0];
    let counts = point["bucketCounts"].as_array().expect("buckets").iter();
    let sum: u64 = counts
        .filter_map(|count| count.as_str()?.parse::<u64>().ok())
        .sum();
    assert_eq!(point["count"], sum.to_string());
    assert_eq!(metrics["rcomm.collective.duration"]["unit"], "s");
    assert_eq!(metrics["rcomm.collectives"]["sum"]["isMonotonic"], true);
    assert_eq!(web.sample("rcomm_otel_spans_dropped_total"), 0.0);
}

#[test]
fn a_collector_that_takes_nothing_costs_nothing_but_what_is_dropped() {
    // One that refuses connections, and one that takes them and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let silent_url = format!("http://{}", silent.local_addr().expect("bound"));
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
fn a_variable_that_cannot_be_used_is_named_at_the_start() {
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
