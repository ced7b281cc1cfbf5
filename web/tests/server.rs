//! `rcomm-web` as a user runs it: a process on real dumps, asked over a real socket.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(30);

/// A running server; killed when dropped.
struct Web {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    address: SocketAddr,
    token: Option<String>,
}

impl Web {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rcomm-web"))
            .args(["--listen", "127.0.0.1:0"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program of this package starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("the address is printed");
        let rest = line.trim().strip_prefix("http://").expect("an address");
        let (address, query) = rest.split_once('/').expect("a path");
        let token = query.strip_prefix("?token=").map(str::to_owned);
        Self {
            child,
            _stdout: stdout,
            address: address.parse().expect("an address"),
            token,
        }
    }

    fn on_dumps(scenario: &str, args: &[&str]) -> Self {
        let dumps = format!(
            "{}/../tests/fixtures/dumps/{scenario}/pickle",
            env!("CARGO_MANIFEST_DIR")
        );
        let mut all = vec![dumps.as_str()];
        all.extend(args);
        let web = Self::start(&all);
        let began = Instant::now();
        while web.get("/readyz", &[]).status != 200 {
            assert!(
                began.elapsed() < DEADLINE,
                "the dumps were not read in time"
            );
            std::thread::yield_now();
        }
        web
    }

    fn authorized(&self) -> String {
        format!(
            "Authorization: Bearer {}",
            self.token.as_deref().expect("a token was printed")
        )
    }

    /// One request on a connection of its own.
    fn get(&self, path: &str, headers: &[&str]) -> Answer {
        let mut stream = self.connect();
        let host = self.address;
        let mut request = format!("GET {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|header| header.starts_with("Host:")) {
            request.push_str(&format!("Host: {host}\r\n"));
        }
        for header in headers {
            request.push_str(header);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        stream
            .write_all(request.as_bytes())
            .expect("the server listens");
        let mut text = String::new();
        stream
            .read_to_string(&mut text)
            .expect("the server answers and closes");
        Answer::parse(&text)
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        stream
    }

    fn stop(&mut self) -> std::process::ExitStatus {
        let pid = self.child.id().to_string();
        let killed = Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .expect("kill is there");
        assert!(killed.success());
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status;
            }
            assert!(began.elapsed() < DEADLINE, "SIGTERM was not heeded");
            std::thread::yield_now();
        }
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .expect("a status");
        Self {
            status,
            head: head.to_lowercase(),
            body: body.to_owned(),
        }
    }
}

#[test]
fn report_names_the_rank_at_fault() {
    let web = Web::on_dumps("cascade-2x2x2", &[]);
    let answer = web.get("/api/v1/report", &[&web.authorized()]);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let report: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(report["schema"], "rcomm.report/1");
    assert_eq!(report["verdict"], "stuck");
    assert_eq!(report["findings"][0]["code"], "E101");
    assert_eq!(
        report["findings"][0]["culprit_ranks"],
        serde_json::json!([5])
    );
}

#[test]
fn healthy_dumps_have_no_finding() {
    let web = Web::on_dumps("healthy-w4", &[]);
    let answer = web.get("/api/v1/report", &[&web.authorized()]);
    let report: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(
        (&report["verdict"], &report["findings"]),
        (&"healthy".into(), &serde_json::json!([]))
    );
}

#[test]
fn nothing_is_told_without_the_token() {
    let web = Web::on_dumps("healthy-w4", &[]);
    for path in [
        "/",
        "/api/v1/report",
        "/api/v1/events",
        "/metrics",
        "/assets/app.js",
    ] {
        let answer = web.get(path, &[]);
        assert_eq!(answer.status, 401, "{path}: {}", answer.body);
        assert_eq!(
            web.get(path, &["Authorization: Bearer wrong"]).status,
            401,
            "{path}"
        );
    }
    assert_eq!(web.get("/healthz", &[]).status, 200);
}

#[test]
fn printed_address_leads_to_the_page_and_leaves_the_token_in_a_cookie() {
    let web = Web::on_dumps("healthy-w4", &[]);
    let token = web.token.clone().expect("printed");
    let moved = web.get(&format!("/?token={token}"), &[]);
    assert_eq!(moved.status, 303);
    assert!(
        moved.head.contains("location: /\r\n") || moved.head.ends_with("location: /"),
        "{}",
        moved.head
    );
    assert!(
        moved.head.contains("httponly; samesite=strict"),
        "{}",
        moved.head
    );
    let page = web.get("/", &[&format!("Cookie: rcomm_token={token}")]);
    assert_eq!(page.status, 200);
    assert!(page.body.contains("/assets/app.js"));
    assert!(
        page.head
            .contains("content-security-policy: default-src 'none'"),
        "{}",
        page.head
    );
}

#[test]
fn names_and_origins_of_others_are_refused() {
    let web = Web::on_dumps("healthy-w4", &["--host-name", "n07.cluster"]);
    let token = web.authorized();
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Host: evil.example"])
            .status,
        421
    );
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Host: n07.cluster:8765"])
            .status,
        200
    );
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Origin: http://evil.example"])
            .status,
        403
    );
    let own = format!("Origin: http://{}", web.address);
    assert_eq!(web.get("/api/v1/report", &[&token, &own]).status, 200);
}

#[test]
fn event_stream_begins_with_the_present_picture() {
    let web = Web::on_dumps("cascade-2x2x2", &[]);
    let mut stream = web.connect();
    let request = format!(
        "GET /api/v1/events HTTP/1.1\r\nHost: {}\r\n{}\r\n\r\n",
        web.address,
        web.authorized()
    );
    stream
        .write_all(request.as_bytes())
        .expect("the server listens");
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let data = lines
        .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
        .next()
        .expect("an event");
    let message: Value = serde_json::from_str(&data).expect("JSON");
    assert_eq!(
        message["report"]["findings"][0]["culprit_ranks"],
        serde_json::json!([5])
    );
    assert_eq!(message["status"]["ranks"], 8);
}

#[test]
fn unknown_paths_say_where_to_look() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let answer = web.get("/api/v2/report", &[]);
    assert_eq!(answer.status, 404);
    assert!(answer.body.contains("GET /api/v1 lists"), "{}", answer.body);
    assert_eq!(web.get("/assets/..%2f..%2fetc%2fpasswd", &[]).status, 404);
}

#[test]
fn metrics_have_both_forms_and_pass_the_lint() {
    let web = Web::on_dumps("cascade-2x2x2", &["--no-token"]);
    let text = web.get("/metrics", &[]);
    assert!(
        text.head.contains("text/plain; version=0.0.4"),
        "{}",
        text.head
    );
    assert!(
        text.body
            .contains("rcomm_verdict_info{verdict=\"stuck\"} 1"),
        "{}",
        text.body
    );
    assert!(
        text.body
            .contains("rcomm_findings{code=\"E101\",name=\"not_joined\",severity=\"error\"} 1")
    );
    let open = web.get(
        "/metrics",
        &["Accept: application/openmetrics-text; version=1.0.0"],
    );
    assert!(
        open.head.contains("application/openmetrics-text"),
        "{}",
        open.head
    );
    assert!(open.body.ends_with("# EOF\n"), "{}", open.body);
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped the lint: promtool is not installed"
        );
        return;
    };
    promtool
        .stdin
        .take()
        .expect("piped")
        .write_all(text.body.as_bytes())
        .expect("promtool reads");
    let linted = promtool.wait_with_output().expect("promtool ends");
    assert!(
        linted.status.success(),
        "{}{}",
        String::from_utf8_lossy(&linted.stdout),
        String::from_utf8_lossy(&linted.stderr)
    );
}

#[test]
fn a_signal_ends_it_also_while_a_stream_is_open() {
    let mut web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let mut stream = web.connect();
    write!(
        stream,
        "GET /api/v1/events HTTP/1.1\r\nHost: {}\r\n\r\n",
        web.address
    )
    .expect("the server listens");
    let mut first = [0_u8; 12];
    stream.read_exact(&mut first).expect("the stream is open");
    assert_eq!(&first, b"HTTP/1.1 200");
    assert!(web.stop().success());
}

#[test]
fn open_doors_beyond_this_machine_are_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-web"))
        .args(["--listen", "0.0.0.0:0", "--no-token"])
        .output()
        .expect("the program of this package starts");
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("--no-token is for loopback addresses only"),
        "{text}"
    );
}
