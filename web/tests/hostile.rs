//! Tests the server with hostile and with mistaken clients, and the program with wrong arguments.

mod common;

use common::{Web, form, wait_until};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

/// Sends these bytes on a new connection. Returns the status of the answer; `None` if there is none.
fn status_of(web: &Web, request: &[u8]) -> Option<u16> {
    let mut stream = web.connect();
    // A server that refuses early need not read the rest.
    let _ = stream.write_all(request);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    text.split(' ').nth(1)?.parse().ok()
}

#[test]
fn malformed_and_oversized_requests_are_answered_and_the_server_survives() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let host = web.address;
    let head = |path: &str, more: &str| {
        format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n")
            .into_bytes()
    };
    let long = "x".repeat(9_000);
    let many: String = (0..100).map(|n| format!("x-{n}: y\r\n")).collect();
    let huge = format!("x: {}\r\n", "y".repeat(64 * 1024));
    for (what, request, wanted) in [
        ("a long URI", head(&format!("/?{long}"), ""), &[414][..]),
        ("many headers", head("/", &many), &[431]),
        ("a huge header", head("/", &huge), &[431]),
        (
            "a TLS handshake",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".to_vec(),
            &[400],
        ),
        (
            "no host",
            b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n".to_vec(),
            &[421],
        ),
        ("two hosts", head("/", &format!("Host: {host}\r\n")), &[421]),
        (
            "the address of another host",
            head("http://evil.example/api/v1/report", ""),
            &[421],
        ),
        ("a bad length", head("/", "Content-Length: -1\r\n"), &[400]),
        (
            "two lengths",
            head("/", "Content-Length: 1\r\nContent-Length: 2\r\n"),
            &[400],
        ),
        (
            "a path that climbs",
            head("/assets/../../etc/passwd", ""),
            &[404],
        ),
        (
            "a path that climbs, encoded",
            head("/assets/%2e%2e/%2e%2e/etc/passwd", ""),
            &[404],
        ),
        ("a zero byte", head("/assets/app.js%00.css", ""), &[404]),
        (
            "a negative number",
            head("/api/v1/report?at=-1", ""),
            &[400],
        ),
        (
            "a snapshot that does not exist",
            head("/api/v1/report?at=18446744073709551615", ""),
            &[404],
        ),
        (
            "a snapshot and an upload",
            head("/api/v1/report?at=1&upload=x", ""),
            &[400],
        ),
        (
            "too many seconds",
            head("/api/v1/timeline?seconds=1e300", ""),
            &[400],
        ),
        (
            "seconds that are no number",
            head("/api/v1/timeline?seconds=NaN", ""),
            &[400],
        ),
        (
            "invalid cursors",
            head(
                "/api/v1/records?since=,,:::,1.2:x,9.9.9.9:18446744073709551615",
                "",
            ),
            &[200],
        ),
    ] {
        let status = status_of(&web, &request);
        assert!(
            status.is_some_and(|status| wanted.contains(&status)),
            "{what}: {status:?}"
        );
    }
    for method in ["POST", "DELETE", "PUT", "OPTIONS"] {
        assert_eq!(
            web.ask(method, "/api/v1/report", &[], b"").status,
            405,
            "{method}"
        );
    }
    assert_eq!(web.get("/healthz", &[]).status, 200);
}

#[test]
fn uploads_are_limited_and_never_leave_their_folder() {
    let scratch = tempfile::tempdir().expect("a temporary directory can be made");
    let web = Web::start_with(
        &["--no-token", "--demo", "healthy", "--upload-limit", "1"],
        |command| {
            command.env("TMPDIR", scratch.path());
        },
    );
    web.wait_until_ready();
    let post = |files: &[(&str, &[u8])]| {
        let (kind, body) = form(files);
        web.ask("POST", "/api/v1/uploads", &[&kind], &body)
    };
    let large = vec![0; 2 << 20];
    assert_eq!(post(&[("rank_0", &large)]).status, 413);
    let refused = post(&[("../../../evil", b"{}")]);
    assert_eq!(refused.status, 422, "{}", refused.body);
    let scratch_path = scratch.path().display().to_string();
    assert!(!refused.body.contains(&scratch_path), "{}", refused.body);
    assert_eq!(post(&[]).status, 422);
    assert_eq!(post(&[("a/rank_0", b"x"), ("a\\rank_0", b"y")]).status, 422);
    let plain = web.ask(
        "POST",
        "/api/v1/uploads",
        &["Content-Type: text/plain"],
        b"rank",
    );
    assert!((400..500).contains(&plain.status), "{}", plain.status);
    // A form that ends in the middle.
    let (kind, mut body) = form(&[("rank_0", b"0123456789")]);
    body.truncate(body.len() / 2);
    assert!((400..500).contains(&web.ask("POST", "/api/v1/uploads", &[&kind], &body).status));
    // The uploaded files are removed, and the one private folder is empty.
    let folders: Vec<_> = std::fs::read_dir(scratch.path())
        .expect("the path is readable")
        .flatten()
        .collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    let metadata = folders[0].metadata().expect("the folder exists");
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777,
        0o700
    );
    assert_eq!(
        std::fs::read_dir(folders[0].path())
            .expect("the path is readable")
            .count(),
        0
    );
}

/// One sample of `/metrics`; `None` if the server refuses the connection, since it may still have too many.
fn scrape(web: &Web, name: &str) -> Option<f64> {
    let mut stream = web.connect();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.parse().ok()
}

#[test]
fn unfinished_requests_make_room_for_clients_and_admitted_clients_do_not() {
    const PLACES: usize = 4;
    let web = Web::demo("healthy", 4, &["--no-token", "--max-connections", "4"]);
    let mut unfinished: Vec<TcpStream> = Vec::new();
    for _ in 0..8 * PLACES {
        let mut stream = web.connect();
        stream
            .write_all(b"GET / HTTP/1.1\r\n")
            .expect("the connection has room");
        unfinished.push(stream);
        if unfinished.len().is_multiple_of(PLACES) {
            assert_eq!(web.get("/api/v1/status", &[]).status, 200);
        }
    }
    let closed = |stream: &mut TcpStream| matches!(stream.read(&mut [0]), Ok(0) | Err(_));
    assert!(
        closed(&mut unfinished[0]),
        "the oldest unfinished request was kept"
    );
    wait_until("a closed connection to be counted", || {
        (scrape(&web, "rcomm_web_connections_refused_total")? > 0.0).then_some(())
    });
    let mut clients: Vec<TcpStream> = (0..PLACES)
        .map(|_| {
            wait_until("a place for a client", || {
                let mut stream = web.connect();
                let request = "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
                stream.write_all(request.as_bytes()).ok()?;
                (stream.read(&mut [0]).ok()? == 1).then_some(stream)
            })
        })
        .collect();
    assert!(closed(&mut web.connect()), "a fifth connection was served");
    for client in &mut clients {
        assert!(!closed(client), "a client was closed for another");
    }
}

/// Waits for the end of a program that should end at once, and returns what it printed. A program that does not end is
/// killed, and the test fails.
fn output_of(command: &mut Command) -> Output {
    let program = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let program = program.stderr(Stdio::piped()).spawn();
    let mut program = Ending(Some(program.expect("the program of this package starts")));
    wait_until("the program to end", || {
        program
            .0
            .as_mut()?
            .try_wait()
            .expect("a child can be waited for")
    });
    let program = program.0.take().expect("the program was not killed");
    program
        .wait_with_output()
        .expect("the output of a child can be read")
}

/// A program that is killed with the test that waits for its end.
struct Ending(Option<Child>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(program) = &mut self.0 {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

#[test]
fn wrong_arguments_are_answered_by_what_to_write() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let text = folder.path().join("text").display().to_string();
    std::fs::write(&text, "no certificate").expect("the directory is writable");
    let missing = folder.path().join("missing").display().to_string();
    let beyond_a_file = format!("{text}/dump");
    for (args, wanted) in [
        (&[&*missing][..], "missing: No such file or directory"),
        (&[&*beyond_a_file][..], "text/dump: Not a directory"),
        (&["--node", "n07"], "write http://n07:8765"),
        (&["--refresh", "0s"], "longer than zero"),
        (&["--overdue", "5"], "write 500ms, 5s"),
        (&["--listen", "8765"], "write 127.0.0.1:8765"),
        (
            &["--tls-cert", &text, "--tls-key", &text],
            "no certificate in PEM",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-web"));
        if !args.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let output = output_of(command.args(args).env_remove("RCOMM_WEB_TOKEN"));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(wanted), "{args:?}: {text}");
    }
}

#[test]
fn exposure_beyond_this_machine_needs_explicit_options() {
    let start = |args: &[&str], token: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-web"));
        command
            .args(["--listen", "0.0.0.0:0"])
            .args(args)
            .env_remove("RCOMM_WEB_TOKEN");
        if let Some(token) = token {
            command.env("RCOMM_WEB_TOKEN", token);
        }
        let output = output_of(&mut command);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (args, token, wanted) in [
        (
            &["--no-token", "--plain-http"][..],
            None,
            "--no-token is for loopback addresses only",
        ),
        (
            &[],
            Some("0123456789abcdef"),
            "give --tls-cert and --tls-key",
        ),
        (&["--plain-http"], None, "pass --token-file"),
        (&["--plain-http"], Some("short"), "at least 16 characters"),
    ] {
        let text = start(args, token);
        assert!(text.contains(wanted), "{args:?}: {text}");
    }
}

#[test]
fn a_wrong_token_in_the_address_does_not_end_a_session() {
    let web = Web::on_dumps("healthy-w4", &[]);
    let token = web.token.clone().expect("a token was printed");
    let opened = web.get(&format!("/?token={token}"), &[]);
    let (_, set_cookie) =
        (opened.head.split_once("set-cookie: ")).expect("the answer sets a cookie");
    let (cookie, _) = set_cookie
        .split_once(';')
        .expect("the cookie has attributes");
    let cookie = format!("Cookie: {cookie}");
    // The address leads to the page, and the cookie stays as it is.
    let wrong = web.get("/?token=wrong", &[&cookie]);
    assert_eq!(wrong.status, 303);
    assert!(!wrong.head.contains("set-cookie"), "{}", wrong.head);
    assert_eq!(web.get("/", &[&cookie]).status, 200);
    assert_eq!(web.get("/?token=wrong", &[]).status, 401);
}
