//! Many clients at once, and clients over TLS.

mod common;

use common::{Web, skip, wait_until};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const CLIENTS: usize = 200;

/// How long two hundred clients are served: so many pictures, unless `RCOMM_TEST_PICTURES_SERVED` says more.
fn pictures() -> u64 {
    let wanted = std::env::var("RCOMM_TEST_PICTURES_SERVED");
    wanted.ok().and_then(|it| it.parse().ok()).unwrap_or(30)
}

#[test]
fn two_hundred_event_streams_are_served_in_flat_memory() {
    let web = Web::demo("healthy", 64, &["--no-token"]);
    let received = Arc::<AtomicU64>::default();
    for _ in 0..CLIENTS {
        let mut stream = web.connect();
        let host = web.address;
        write!(
            stream,
            "GET /api/v1/events HTTP/1.1\r\nHost: {host}\r\n\r\n"
        )
        .expect("it listens");
        let received = received.clone();
        // Ends with the server's end of the stream.
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
            .expect("a number")
    };
    wait_until("all streams", || {
        (web.sample("rcomm_web_event_streams") >= CLIENTS as f64).then_some(())
    });
    let start = number();
    wait_until("a few pictures", || (number() > start + 5).then_some(()));
    let (before, bytes) = (web.resident_kib(), received.load(Relaxed));
    let (start, wanted) = (number(), pictures());
    let mut last = start;
    while last < start + wanted {
        last = wait_until("the next picture", || {
            Some(number()).filter(|it| *it > last)
        });
    }
    let (after, more) = (web.resident_kib(), received.load(Relaxed) - bytes);
    let _ = writeln!(
        std::io::stderr(),
        "{CLIENTS} clients, {} pictures, {} MiB sent: {before} KiB before, {after} KiB after",
        last - start,
        more >> 20
    );
    assert!(more > CLIENTS as u64 * wanted * 100, "{more} bytes came");
    // History may grow by some kilobytes a picture.
    assert!(
        after < before + 24 * 1024,
        "{before} KiB grew to {after} KiB"
    );
    assert_eq!(web.sample("rcomm_web_slow_clients_dropped_total"), 0.0);
}

#[test]
fn tls_is_spoken_and_plain_http_is_not() {
    let there = ["openssl", "curl"].iter().all(|program| {
        let version = if *program == "openssl" {
            "version"
        } else {
            "--version"
        };
        Command::new(program).arg(version).output().is_ok()
    });
    if !there {
        return skip("openssl and curl are not installed");
    }
    let folder = tempfile::tempdir().expect("a directory");
    let (cert, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    let path = |path: &Path| path.to_str().expect("plain text").to_owned();
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
    wait_until("the sources to be looked at", || {
        curl(&[], "/readyz").contains("200").then_some(())
    });
    assert!(curl(&[], "/api/v1/report").contains("401 Unauthorized"));
    let report = curl(&["--header", &web.authorized()], "/api/v1/report");
    assert!(report.contains("rcomm.report/1"), "{report}");
    let token = web.token.clone().expect("printed");
    let page = curl(&[], &format!("/?token={token}"));
    assert!(page.contains("SameSite=Strict; Secure"), "{page}");
    let mut plain = web.connect();
    plain
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .expect("it listens");
    let mut answer = Vec::new();
    // The connection may be reset.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
}

#[test]
fn a_key_that_does_not_fit_is_told_at_the_start() {
    let folder = tempfile::tempdir().expect("a directory");
    let file = folder.path().join("nonsense.pem");
    std::fs::write(&file, "no certificate").expect("writable");
    let file = file.to_str().expect("plain text");
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-web"))
        .args(["--demo", "healthy", "--tls-cert", file, "--tls-key", file])
        .output()
        .expect("the program of this package starts");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("nonsense.pem"), "{text}");
}
