//! Many clients at once, clients that do not read, and clients over TLS.

mod common;

use common::{Web, skip, wait_until};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::SimulatedSource;
use rcomm_analyzer::{LiveOptions, Pace};
use rcomm_web::{Access, Limits, Server, SnapshotStore};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const CLIENTS: usize = 200;

/// How long clients are served: for a number of snapshots, or for a time.
#[derive(Clone, Copy)]
enum Span {
    Snapshots(u64),
    Time(Duration),
}

#[test]
fn two_hundred_event_streams_are_served_in_bounded_memory() {
    serve_streams(8, Span::Snapshots(30));
}

/// As above, with more ranks and for a minute:
///
/// ```text
/// cargo test --release -p rcomm-web --test endurance -- --ignored --nocapture
/// ```
#[test]
#[ignore = "takes a minute"]
fn two_hundred_event_streams_are_served_in_bounded_memory_for_a_minute() {
    serve_streams(64, Span::Time(Duration::from_secs(60)));
}

/// Serves [`CLIENTS`] event streams, and checks that the memory stays bounded and that no client is dropped.
fn serve_streams(ranks: u32, span: Span) {
    let web = Web::demo("healthy", ranks, &["--no-token"]);
    let received = Arc::<AtomicU64>::default();
    for _ in 0..CLIENTS {
        let mut stream = web.connect();
        let host = web.address;
        write!(
            stream,
            "GET /api/v1/events HTTP/1.1\r\nHost: {host}\r\n\r\n"
        )
        .expect("the server listens");
        let received = received.clone();
        // Ends when the server closes the stream.
        std::thread::spawn(move || {
            let mut buffer = [0; 16 * 1024];
            while let Ok(read @ 1..) = stream.read(&mut buffer) {
                received.fetch_add(read as u64, Relaxed);
            }
        });
    }
    let number = || {
        web.get("/api/v1/status", &[]).json()["number"]
            .as_u64()
            .expect("the value is a number")
    };
    wait_until("all streams", || {
        (web.sample("rcomm_web_event_streams") >= CLIENTS as f64).then_some(())
    });
    let start = number();
    wait_until("a few snapshots", || (number() > start + 5).then_some(()));
    let (before, bytes_before) = (web.resident_kib(), received.load(Relaxed));
    let (began, start) = (Instant::now(), number());
    let (mut last, mut min, mut max) = (start, before, before);
    loop {
        let over = match span {
            Span::Snapshots(snapshots) => last >= start + snapshots,
            Span::Time(time) => began.elapsed() >= time,
        };
        if over {
            break;
        }
        last = wait_until("the next snapshot", || {
            Some(number()).filter(|it| *it > last)
        });
        let resident = web.resident_kib();
        (min, max) = (min.min(resident), max.max(resident));
    }
    let (after, bytes) = (web.resident_kib(), received.load(Relaxed) - bytes_before);
    let snapshots = last - start;
    let _ = writeln!(
        std::io::stderr(),
        "{CLIENTS} clients, {ranks} ranks, {:.0?}, {snapshots} snapshots, {} MiB sent: {before} KiB before, \
         {after} KiB after, {min} to {max} between",
        began.elapsed(),
        bytes >> 20
    );
    assert!(
        bytes > CLIENTS as u64 * snapshots * 100,
        "only {bytes} bytes were received"
    );
    // The history may grow by some kilobytes per snapshot.
    assert!(max < before + 24 * 1024, "{before} KiB grew to {max} KiB");
    assert_eq!(web.sample("rcomm_web_slow_clients_dropped_total"), 0.0);
}

/// A server within this process with a short limit for clients that do not read.
struct StrictServer {
    address: SocketAddr,
    _watch: rcomm_analyzer::Watch,
    _runtime: tokio::runtime::Runtime,
}

impl StrictServer {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("the threads start");
        let job = Simulation::new(Situation::Healthy, 8, 0);
        let job = SimulatedSource::new(job, || 5_000_000_000);
        let watched =
            SnapshotStore::watch(vec![Box::new(job)], LiveOptions::default(), Pace::default());
        let (store, watch) = watched.expect("the threads start");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = runtime.block_on(Server::bind(any, store, Access::open()));
        let server = server.expect("a port is free").limits(Limits {
            idle_timeout: Duration::from_millis(300),
            ..Limits::default()
        });
        let address = server.address();
        runtime.spawn(server.run(std::future::pending()));
        Self {
            address,
            _watch: watch,
            _runtime: runtime,
        }
    }

    fn ask(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        let host = self.address;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n").expect("the server listens");
        let mut text = String::new();
        stream
            .read_to_string(&mut text)
            .expect("the server answers in UTF-8");
        text
    }

    fn sample(&self, name: &str) -> u64 {
        let text = self.ask("/metrics");
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{name} in {text}"))
    }
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_counted_and_the_others_are_served() {
    let server = StrictServer::start();
    let dropped = || server.sample("rcomm_web_slow_clients_dropped_total ");
    assert_eq!(dropped(), 0);
    // The client requests more than the sockets can hold, and reads nothing.
    let mut slow = TcpStream::connect(server.address).expect("the server listens");
    let host = server.address;
    let question = format!("GET /assets/vendor/uPlot.esm.min.js HTTP/1.1\r\nHost: {host}\r\n\r\n");
    slow.set_write_timeout(Some(Duration::from_secs(1)))
        .expect("the time-out is positive");
    for _ in 0..600 {
        // The server may drop the client before it has sent all requests.
        if slow.write_all(question.as_bytes()).is_err() {
            break;
        }
    }
    wait_until("the slow client to be dropped", || {
        let page = server.ask("/");
        assert!(page.starts_with("HTTP/1.0 200"), "{page}");
        (dropped() == 1).then_some(())
    });
    wait_until("the slow client's connection to be closed", || {
        // Only the connection of this scrape is left.
        (server.sample("rcomm_web_connections ") == 1).then_some(())
    });
    // After the unread bytes, the stream ends.
    slow.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("the time-out is positive");
    let mut buffer = vec![0; 1 << 20];
    while let Ok(1..) = slow.read(&mut buffer) {}
    assert_eq!(dropped(), 1);
}

#[test]
fn a_tls_server_serves_clients_that_trust_it_and_refuses_plain_http() {
    let are_installed = ["openssl", "curl"].iter().all(|program| {
        let version = if *program == "openssl" {
            "version"
        } else {
            "--version"
        };
        Command::new(program).arg(version).output().is_ok()
    });
    if !are_installed {
        return skip("openssl and curl are not installed");
    }
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let (cert, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    let path = |path: &Path| path.to_str().expect("the path is UTF-8").to_owned();
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
        ])
        .args([
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
        ])
        .args(["-keyout", &path(&key), "-out", &path(&cert)])
        .output()
        .expect("openssl runs");
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let web = Web::start(&[
        "--demo",
        "healthy",
        "--tls-cert",
        &path(&cert),
        "--tls-key",
        &path(&key),
    ]);
    let url = format!("https://localhost:{}", web.address.port());
    let curl = |args: &[&str], path: &str| {
        let output = Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--include",
                "--max-time",
                "20",
                "--cacert",
            ])
            .arg(&cert)
            .args(args)
            .arg(format!("{url}{path}"))
            .output()
            .expect("curl runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        String::from_utf8_lossy(&output.stdout).into_owned() + &errors
    };
    wait_until("the sources to be read", || {
        curl(&[], "/readyz").contains("200").then_some(())
    });
    assert!(curl(&[], "/api/v1/report").contains("401 Unauthorized"));
    let report = curl(&["--header", &web.authorized()], "/api/v1/report");
    assert!(report.contains("rcomm.report/1"), "{report}");
    let token = web.token.clone().expect("a token was printed");
    let page = curl(&[], &format!("/?token={token}"));
    assert!(page.contains("SameSite=Strict; Secure"), "{page}");
    let mut plain = web.connect();
    plain
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .expect("the server listens");
    let mut answer = Vec::new();
    // The server may reset the connection.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
}

#[test]
fn an_invalid_certificate_is_reported_at_start() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let file = folder.path().join("nonsense.pem");
    std::fs::write(&file, "no certificate").expect("the path is writable");
    let file = file.to_str().expect("the path is UTF-8");
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-web"))
        .args(["--demo", "healthy", "--tls-cert", file, "--tls-key", file])
        .output()
        .expect("the program of this package starts");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("nonsense.pem"), "{text}");
}
