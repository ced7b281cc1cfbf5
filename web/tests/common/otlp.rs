//! A fake OTLP collector; its requests are decoded by OpenTelemetry's own Python classes.
//!
//! `RCOMM_TEST_OTEL_PYTHON` names a Python that has `opentelemetry-proto`; without it, one is installed in the target
//! folder if pip can do so.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

/// Stores the bodies of requests in a folder, and refuses requests without the right content type or `api-key`.
pub struct Collector {
    pub address: SocketAddr,
    folder: tempfile::TempDir,
    /// Number of accepted requests.
    pub taken: Arc<AtomicUsize>,
}

impl Collector {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let collector = Self {
            address: listener.local_addr().expect("the socket is bound"),
            folder: tempfile::tempdir().expect("a temporary directory can be made"),
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

    /// Number of accepted requests for a signal.
    pub fn files(&self, signal: &str) -> usize {
        let entries = std::fs::read_dir(self.folder.path())
            .expect("the path is readable")
            .flatten();
        let named = entries.filter(|it| it.file_name().to_string_lossy().starts_with(signal));
        named.count()
    }

    /// All accepted requests as JSON, by signal.
    pub fn decoded(&self, python: &Path) -> Value {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|folder| folder.join("web/tests/decode_otlp.py"))
            .find(|script| script.is_file())
            .expect("the script lies in the repository");
        let output = Command::new(python)
            .arg(script)
            .arg(self.folder.path())
            .output()
            .expect("Python runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"))
    }
}

/// Reads, stores and answers one request; a connection may carry several. `None` at the end of the connection.
fn receive(stream: &TcpStream, folder: &Path, taken: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut request_line = String::new();
    reader.read_line(&mut request_line).ok()?;
    let path = request_line.split(' ').nth(1)?.to_owned();
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
    let is_valid = headers
        .get("content-type")
        .is_some_and(|it| it == "application/x-protobuf")
        && headers.get("api-key").is_some_and(|it| it == "a secret");
    let signal = path.strip_prefix("/v1/").filter(|_| is_valid);
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

/// A Python with OpenTelemetry's messages; `None`, with the reason printed, if there is none.
pub fn python() -> Option<PathBuf> {
    // Tests run in parallel: one of them installs, and the others wait for it.
    static FOUND: LazyLock<Option<PathBuf>> = LazyLock::new(find_python);
    FOUND.clone()
}

fn find_python() -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("RCOMM_TEST_OTEL_PYTHON") {
        return Some(python.into());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("otel-python");
    let python = folder.join("bin/python");
    let run = |program: &Path, args: &[&str]| {
        let output = Command::new(program).args(args).output();
        output.is_ok_and(|output| output.status.success())
    };
    let is_installed = || {
        run(
            &python,
            &["-c", "import opentelemetry.proto.trace.v1.trace_pb2"],
        )
    };
    let folder_text = folder.to_str()?;
    if is_installed()
        || (run(Path::new("python3"), &["-m", "venv", folder_text])
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
            && is_installed())
    {
        return Some(python);
    }
    let _ = writeln!(
        std::io::stderr(),
        "skipped: there is no Python with opentelemetry-proto, and pip cannot install it"
    );
    None
}

/// The attributes of a span, a record, a point or a resource, as a map of plain values.
pub fn attributes(item: &Value) -> HashMap<String, Value> {
    let list = item["attributes"].as_array().cloned().unwrap_or_default();
    let pair = |it: &Value| {
        let value = it["value"]
            .as_object()
            .and_then(|value| value.values().next());
        Some((it["key"].as_str()?.to_owned(), value?.clone()))
    };
    list.iter().filter_map(pair).collect()
}

/// The items in requests, each after its resource. `path` names the lists of resources, of their scopes, and of the
/// items of a scope.
pub fn items<'a>(
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
