//! Runs `rcomm-web` as a process and queries it over real sockets.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod npm;
pub mod otlp;
pub mod rings;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for every awaited condition, on a slow machine too.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A running server; killed when dropped.
pub struct Web {
    pub child: Child,
    _stdout: BufReader<ChildStdout>,
    pub address: SocketAddr,
    /// `None` with `--no-token`.
    pub token: Option<String>,
}

impl Web {
    /// Starts the program on a free port of the loopback address.
    pub fn start(args: &[&str]) -> Self {
        Self::start_with(args, |_| {})
    }

    /// Works like [`Self::start`]; `change` may add to the command.
    pub fn start_with(args: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-web"));
        command
            .args(["--listen", "127.0.0.1:0"])
            .args(args)
            .env_remove("RCOMM_WEB_TOKEN")
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the program of this package starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("the stream is piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("the address is printed");
        let (_, rest) = line.trim().split_once("://").expect("the line has a URL");
        let (address, query) = rest.split_once('/').expect("the URL has a path");
        let token = query.strip_prefix("?token=").map(str::to_owned);
        Self {
            child,
            _stdout: stdout,
            address: address.parse().expect("the URL has an address"),
            token,
        }
    }

    /// Serves the dumps of a labelled job; returns once they are read.
    pub fn on_dumps(scenario: &str, args: &[&str]) -> Self {
        let dumps = dumps_of(scenario);
        let mut all = vec![dumps.as_str()];
        all.extend(args);
        let web = Self::start(&all);
        web.wait_until_ready();
        web
    }

    /// Serves a simulated job; returns once it is read.
    pub fn demo(situation: &str, ranks: u32, args: &[&str]) -> Self {
        let ranks = ranks.to_string();
        let mut all = vec!["--demo", situation, "--ranks", &ranks, "--refresh", "200ms"];
        all.extend(args);
        let web = Self::start(&all);
        web.wait_until_ready();
        web
    }

    /// Waits until the sources were read.
    pub fn wait_until_ready(&self) {
        wait_until("the sources to be read", || {
            (self.get("/readyz", &[]).status == 200).then_some(())
        });
    }

    /// The header with the token.
    pub fn authorized(&self) -> String {
        format!(
            "Authorization: Bearer {}",
            self.token.as_deref().expect("a token was printed")
        )
    }

    /// Sends a GET on a new connection, and reads the answer.
    pub fn get(&self, path: &str, headers: &[&str]) -> Answer {
        self.ask("GET", path, headers, &[])
    }

    /// Sends a request on a new connection, and reads the answer.
    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        let host = self.address;
        let mut request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|header| header.starts_with("Host:")) {
            request.push_str(&format!("Host: {host}\r\n"));
        }
        if !body.is_empty() {
            request.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        for header in headers {
            request.push_str(header);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        stream
            .write_all(request.as_bytes())
            .expect("the server listens");
        // A server that refuses early need not read the rest.
        let _ = stream.write_all(body);
        let mut bytes = Vec::new();
        let read = stream.read_to_end(&mut bytes);
        assert!(
            read.is_ok() || !bytes.is_empty(),
            "no answer to {path:?}: {read:?}"
        );
        Answer::parse(&String::from_utf8_lossy(&bytes))
    }

    /// Connects to the server; a read fails after [`DEADLINE`].
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server listens");
        stream
            .set_read_timeout(Some(DEADLINE))
            .expect("the time-out is positive");
        stream
    }

    /// Sends SIGTERM, and waits for the end of the server.
    pub fn stop(&mut self) -> std::process::ExitStatus {
        let pid = self.child.id().to_string();
        let killed = Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .expect("kill is installed");
        assert!(killed.success());
        wait_until("the server to end after SIGTERM", || {
            self.child
                .try_wait()
                .expect("the process is a child of this one")
        })
    }

    /// Resident memory, KiB.
    pub fn resident_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("the server lives");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        number.expect("Linux shows the resident memory")
    }

    /// One sample of `/metrics` without labels.
    pub fn sample(&self, name: &str) -> f64 {
        let headers = match &self.token {
            Some(_) => vec![self.authorized()],
            None => vec![],
        };
        let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
        let text = self.get("/metrics", &headers).body;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = line.and_then(|value| value.parse().ok());
        value.unwrap_or_else(|| panic!("{name} in {text}"))
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An HTTP answer. `head` has the status line and the headers, in lower case.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text
            .split_once("\r\n\r\n")
            .expect("an empty line follows the head");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .expect("the first line has a status");
        Self {
            status,
            head: head.to_lowercase(),
            body: body.to_owned(),
        }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// The folder with the dumps of a labelled job.
pub fn dumps_of(scenario: &str) -> String {
    format!(
        "{}/../tests/fixtures/dumps/{scenario}/pickle",
        env!("CARGO_MANIFEST_DIR")
    )
}

/// Waits until `look` finds something, and returns that; panics after [`DEADLINE`].
pub fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Prints that a test is skipped, and why.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// The header with the content type of a form with these files, and the form.
pub fn form(files: &[(&str, &[u8])]) -> (String, Vec<u8>) {
    form_of(files.iter().map(|&(name, bytes)| (name, bytes, None)))
}

/// Works like [`form`]; also states when files were written, ms since the epoch, where that is given.
pub fn form_of<'a>(
    files: impl Iterator<Item = (&'a str, &'a [u8], Option<u64>)>,
) -> (String, Vec<u8>) {
    const BOUNDARY: &str = "----a-boundary-of-a-test";
    let mut body = Vec::new();
    for (name, bytes, written_ms) in files {
        if let Some(written_ms) = written_ms {
            let head = "Content-Disposition: form-data; name=\"written_ms\"";
            let field = format!("--{BOUNDARY}\r\n{head}\r\n\r\n{written_ms}\r\n");
            body.extend_from_slice(field.as_bytes());
        }
        let head = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"dump\"; filename=\"{name}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(bytes);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    let kind = format!("Content-Type: multipart/form-data; boundary={BOUNDARY}");
    (kind, body)
}
