//! An HTTP server with prepared answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Answers by path, with or without its parameters; an answer for the path with its parameters comes first. Other
/// paths get 404, like an unknown handler.
pub(crate) type Answers = BTreeMap<&'static str, (u16, Vec<u8>)>;

/// Serves these answers, with one request for each connection, until the process ends.
pub(crate) fn serve(answers: Answers) -> SocketAddr {
    serve_shared(Arc::new(Mutex::new(answers)))
}

/// Like [`serve`], but the caller may change the answers.
pub(crate) fn serve_shared(answers: Arc<Mutex<Answers>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("the socket has an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // An error ends only this connection.
            let _ = answer(stream, &answers.lock().expect("no thread panics"));
        }
    });
    address
}

fn answer(stream: TcpStream, answers: &Answers) -> std::io::Result<()> {
    let mut reader = BufReader::new(&stream);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut field = String::new();
    while reader.read_line(&mut field)? > 2 {
        field.clear();
    }
    let target = request.split(' ').nth(1).unwrap_or("");
    let path = target.split('?').next().unwrap_or("");
    // PyTorch's server expects POST for handlers and GET for all else.
    let is_handler = path.starts_with("/handler/") && !path.ends_with('/');
    let method = if is_handler { "POST" } else { "GET" };
    let prepared = answers.get(target).or_else(|| answers.get(path));
    let prepared = prepared.filter(|_| request.starts_with(method));
    let (status, body) = prepared
        .cloned()
        .unwrap_or((404, b"Handler not found".to_vec()));
    let mut out = &stream;
    write!(
        out,
        "HTTP/1.1 {status} x\r\nKeep-Alive: timeout=1, max=30\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )?;
    out.write_all(&body)
}
