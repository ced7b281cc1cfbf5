//! Handlers of the program's own, by which an endpoint answers further requests.

use super::endpoint::Served;
use super::share::Visitor;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of a program's own handlers.
const MAX_HANDLERS: usize = 64;
/// Maximum length of a handler's name, in bytes.
const MAX_NAME: usize = 64;

/// The parameters of a request to a program's own handler: the pairs of its query.
pub type HandlerParameters = BTreeMap<String, String>;

type Handler = Arc<dyn Fn(&HandlerParameters) -> std::result::Result<String, String> + Send + Sync>;

/// The program's own handlers, by name.
#[derive(Default)]
pub(super) struct ProgramHandlers(Mutex<BTreeMap<String, Handler>>);

impl ProgramHandlers {
    /// Adds a handler, or replaces the one of this name.
    ///
    /// # Errors
    /// The reason why the handler was not added, as a sentence.
    pub(super) fn add(&self, name: &str, handler: Handler) -> std::result::Result<(), String> {
        let is_allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_allowed) {
            return Err(format!(
                "{name:?} cannot name a handler: a name has 1 to {MAX_NAME} lower-case letters, digits, - and _"
            ));
        }
        let mut handlers = self.lock();
        if handlers.len() >= MAX_HANDLERS && !handlers.contains_key(name) {
            return Err(format!(
                "there are {MAX_HANDLERS} handlers, and no more are taken"
            ));
        }
        let replaced = handlers.insert(name.to_owned(), handler);
        drop(handlers);
        // What drops with a handler is the program's, and may add handlers.
        drop(replaced);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Handler>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers `GET /handlers`: the names.
pub(super) async fn list(State(served): State<Arc<Served>>) -> Json<Vec<String>> {
    Json(served.program_handlers.lock().keys().cloned().collect())
}

/// Answers `POST /handlers/NAME?key=value`: what the handler returns, or 400 and its text if it fails; 404 if there is
/// no such handler, and 500 if it panics. Its processor time counts as that of an answer to this client.
pub(super) async fn run(
    State(served): State<Arc<Served>>,
    Extension(visitor): Extension<Arc<Visitor>>,
    Path(name): Path<String>,
    Query(parameters): Query<HandlerParameters>,
) -> Response {
    let handler = served.program_handlers.lock().get(&name).cloned();
    let Some(handler) = handler else {
        let reason = "there is no such handler: GET /handlers lists them\n";
        return (StatusCode::NOT_FOUND, reason).into_response();
    };
    let work = move || handler(&parameters);
    match visitor.elsewhere(work).await {
        Ok(Ok(text)) => text.into_response(),
        Ok(Err(reason)) => (StatusCode::BAD_REQUEST, reason).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Adds a handler when it is dropped.
    struct Successor(Arc<ProgramHandlers>, &'static str);

    impl Drop for Successor {
        fn drop(&mut self) {
            let added = self.0.add(self.1, Arc::new(|_| Ok(String::new())));
            added.unwrap();
        }
    }

    #[test]
    fn a_handler_that_is_replaced_or_refused_may_add_another_when_it_is_dropped() {
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            let handlers = Arc::new(ProgramHandlers::default());
            let add = |name: &str, successor| {
                let successor = Successor(handlers.clone(), successor);
                let handler = move |_: &HandlerParameters| {
                    let _owned = &successor;
                    Ok(String::new())
                };
                handlers.add(name, Arc::new(handler))
            };
            add("rate", "replaced").unwrap();
            handlers
                .add("rate", Arc::new(|_| Ok(String::new())))
                .unwrap();
            add("No name", "refused").unwrap_err();
            for at in 3..MAX_HANDLERS {
                let name = format!("other-{at}");
                handlers
                    .add(&name, Arc::new(|_| Ok(String::new())))
                    .unwrap();
            }
            add("one-too-many", "rate").unwrap_err();
            let names: Vec<String> = handlers.lock().keys().cloned().collect();
            done.send(names).unwrap();
        });
        let names = is_done.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(names.len(), MAX_HANDLERS);
        for name in ["rate", "refused", "replaced"] {
            assert!(names.iter().any(|it| it == name), "{names:?}");
        }
    }
}
