//! Access control: the token, and the host names under which this server answers.
//!
//! Every user of the machine can reach a loopback port, and so can every page in a browser there (DNS
//! rebinding). So a token is required there too, and `Host` and `Origin` are checked.

use crate::http::error::Refusal;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse, Response};
use rcomm_recorder::model::text;
use rcomm_recorder::publish::{Place, Secret};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Prefix of the name of the cookie that is set when a browser passes the token in the address. The port follows it,
/// since browsers share the cookies of a host among all its ports.
const COOKIE: &str = "rcomm_session_";

/// Which requests the server admits, by their token, `Host` and `Origin`.
#[derive(Clone)]
pub struct Access {
    /// The required token; `None` if none is.
    token: Option<Arc<str>>,
    /// Allowed host names in addition to `localhost` and IP addresses.
    hosts: Arc<[String]>,
    /// Whether the server uses TLS only, so that the cookie is marked as secure.
    secure: bool,
}

impl Access {
    /// Requires `token`: as a bearer token, in the address, or proved by the cookie that the server set.
    pub fn with_token(token: impl Into<Arc<str>>) -> Self {
        Self {
            token: Some(token.into()),
            hosts: Arc::from([]),
            secure: false,
        }
    }

    /// Requires no token; `Host` and `Origin` are still checked.
    pub fn open() -> Self {
        Self {
            token: None,
            hosts: Arc::from([]),
            secure: false,
        }
    }

    /// Allows these host names as well.
    #[must_use]
    pub fn with_host_names(mut self, hosts: Vec<String>) -> Self {
        self.hosts = hosts.into();
        self
    }

    /// Marks the cookie as secure, for a server that speaks TLS.
    #[must_use]
    pub fn over_tls(mut self) -> Self {
        self.secure = true;
        self
    }

    /// Generates a token of 128 random bits as hex.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn random_token() -> Result<String, getrandom::Error> {
        let mut bytes = [0_u8; 16];
        getrandom::fill(&mut bytes)?;
        Ok(text::hex(&bytes))
    }

    fn allows_host(&self, name: &str) -> bool {
        let name = name.trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok()
            || self
                .hosts
                .iter()
                .any(|host| host.eq_ignore_ascii_case(name))
    }

    /// Whether the request carries the token, or the cookie that proves it. A bearer token decides alone.
    fn admits(&self, headers: &HeaderMap, uri: &Uri) -> bool {
        let Some(token) = &self.token else {
            return true;
        };
        if let Some(offered) = bearer(headers) {
            return same(offered, token);
        }
        let port = port_of(headers);
        let is_known =
            cookie(headers, port).is_some_and(|offered| same(offered, &session(token, port)));
        is_known || query_token(uri).is_some_and(|offered| same(offered, token))
    }

    /// Whether this is the token that the server requires.
    fn is_token(&self, offered: &str) -> bool {
        (self.token.as_deref()).is_some_and(|token| same(offered, token))
    }
}

/// Whether two texts are the same. How long it takes does not depend on where they differ.
fn same(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

/// The value of the cookie for this port. It proves that the browser once had the token; the token cannot be computed
/// from it, and no other port accepts it.
fn session(token: &str, port: u16) -> String {
    Secret::from_text(token)
        .derive(&format!("cookie of port {port}"))
        .to_hex()
}

/// The port in the `Host` header; 0 if it has none, as for the default port of the scheme.
fn port_of(headers: &HeaderMap) -> u16 {
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let port = host.and_then(|host| host.rsplit_once(':')?.1.parse().ok());
    port.unwrap_or(0)
}

/// The bearer token of the request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let offered = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = offered.split_once(' ')?;
    scheme.eq_ignore_ascii_case("Bearer").then_some(token)
}

/// The value of this server's cookie for this port.
fn cookie(headers: &HeaderMap, port: u16) -> Option<&str> {
    let cookies = headers.get(header::COOKIE)?.to_str().ok()?;
    let name = format!("{COOKIE}{port}");
    cookies
        .split(';')
        .find_map(|pair| pair.trim().strip_prefix(name.as_str())?.strip_prefix('='))
}

/// The token in the address.
fn query_token(uri: &Uri) -> Option<&str> {
    uri.query()?
        .split('&')
        .find_map(|pair| pair.strip_prefix("token="))
}

/// The host name in a `Host` header or an origin, without its port.
fn host_name(authority: &str) -> &str {
    if let Some(end) = authority.find(']') {
        return &authority[..=end];
    }
    authority
        .rsplit_once(':')
        .map_or(authority, |(name, _)| name)
}

/// Checks every request before its route: `Host` and `Origin`, and the token unless the request is a probe (`/healthz`,
/// `/readyz`). Sets strict security headers on the answers. A page that is opened with the token in its address is
/// redirected to the address without the token, with the cookie; a browser that has the cookie keeps it if that token
/// is wrong. A browser without the token is asked for it.
pub(crate) async fn guard(State(access): State<Access>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name| {
        headers
            .get(name)
            .and_then(|value: &HeaderValue| value.to_str().ok())
    };
    // Refuse several Host headers: a proxy in front may have checked a different one than this server reads.
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = match (hosts.next().map(HeaderValue::to_str), hosts.next()) {
        (Some(Ok(host)), None) => host,
        _ => "",
    };
    let target = request.uri().authority();
    let is_known = |authority: &str| access.allows_host(host_name(authority));
    let mut named = std::iter::once(host).chain(target.map(|target| target.as_str()));
    if let Some(unknown) = named.find(|named| !is_known(named)) {
        return with_security_headers(Refusal::UnknownHost(unknown.to_owned()).into_response());
    }
    // Browsers send the origin of a request; only the pages of this server may call the API.
    if let Some(origin) = text(header::ORIGIN) {
        let is_own_page = origin
            .split_once("://")
            .is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host));
        if !is_own_page {
            return with_security_headers(
                Refusal::ForeignOrigin(origin.to_owned()).into_response(),
            );
        }
    }
    let is_probe = matches!(request.uri().path(), "/healthz" | "/readyz");
    let path = request.uri().path();
    let is_page = path == "/" || path.starts_with("/reports/");
    if !is_probe && !access.admits(headers, request.uri()) {
        let accepts_html = text(header::ACCEPT).is_some_and(|kinds| kinds.contains("text/html"));
        return match is_page && accepts_html && request.method() == Method::GET {
            true => ask_for_token(query_token(request.uri()).is_some()),
            false => with_security_headers(Refusal::NoToken.into_response()),
        };
    }
    // Redirect to remove the token from the address: it would stay in the history and leak as referrer.
    if let (&Method::GET, true, Some(token)) =
        (request.method(), is_page, query_token(request.uri()))
    {
        let location = [(header::LOCATION, path.to_owned())];
        // The cookie made of another token would replace the one by which this request was admitted.
        let cookie = access.is_token(token).then(|| {
            let secure = if access.secure { "; Secure" } else { "" };
            let port = port_of(request.headers());
            let value = session(token, port);
            let set_cookie =
                format!("{COOKIE}{port}={value}; Path=/; HttpOnly; SameSite=Strict{secure}");
            [(header::SET_COOKIE, set_cookie)]
        });
        return with_security_headers((StatusCode::SEE_OTHER, cookie, location).into_response());
    }
    // A connection that only probes is not admitted, so another one can take its place.
    if let (false, Some(place)) = (is_probe, request.extensions().get::<Arc<Place>>()) {
        place.admit();
    }
    with_security_headers(next.run(request).await)
}

/// A page with a field for the token. The page loads nothing, so its policy allows nothing but sending the form.
fn ask_for_token(was_wrong: bool) -> Response {
    let wrong = match was_wrong {
        true => "<p role=\"alert\"><strong>This token is wrong.</strong></p>",
        false => "",
    };
    let page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>rcomm: token</title>\n</head>\n<body>\n\
         <main>\n<h1>rcomm</h1>\n{wrong}\n\
         <p>rcomm-web printed an address with a token when it started. Open that address, or enter the token:</p>\n\
         <form method=\"get\"><label>Token <input name=\"token\" type=\"password\" autocomplete=\"off\" required \
         autofocus></label> <button>Open</button></form>\n\
         <p>Programs send it as <code>Authorization: Bearer TOKEN</code>.</p>\n</main>\n</body>\n</html>\n"
    );
    let mut response =
        with_security_headers((StatusCode::UNAUTHORIZED, Html(page)).into_response());
    response.headers_mut().insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
        ),
    );
    response
}

fn with_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let mut set = |name, value| {
        headers.insert(name, HeaderValue::from_static(value));
    };
    set(
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    );
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(header::REFERRER_POLICY, "no-referrer");
    set(header::X_FRAME_OPTIONS, "DENY");
    response
}

/// Whether only this machine can reach the address.
pub fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_lose_their_port_and_keep_their_brackets() {
        assert_eq!(host_name("localhost:8080"), "localhost");
        assert_eq!(host_name("n07"), "n07");
        assert_eq!(host_name("[::1]:80"), "[::1]");
    }

    #[test]
    fn addresses_and_allowed_hosts_pass_and_rebound_names_do_not() {
        let access = Access::open().with_host_names(vec!["n07.cluster".into()]);
        for known in ["localhost", "127.0.0.1", "[::1]", "N07.cluster"] {
            assert!(access.allows_host(known), "{known}");
        }
        assert!(!access.allows_host("evil.example"));
        assert!(!access.allows_host(""));
    }

    #[test]
    fn the_token_is_accepted_in_header_or_address_and_wrong_tokens_are_refused() {
        let access = Access::with_token("secret");
        let admits = |headers: &[(header::HeaderName, &'static str)], uri: &'static str| {
            let headers = headers
                .iter()
                .map(|(name, value)| (name.clone(), HeaderValue::from_static(value)))
                .collect();
            access.admits(&headers, &Uri::from_static(uri))
        };
        assert!(admits(&[(header::AUTHORIZATION, "Bearer secret")], "/"));
        assert!(admits(&[(header::AUTHORIZATION, "bearer secret")], "/"));
        assert!(admits(&[], "/?token=secret"));
        assert!(!admits(&[(header::AUTHORIZATION, "Bearer secre")], "/"));
        assert!(!admits(&[(header::COOKIE, "rcomm_session_0=")], "/"));
        assert!(!admits(&[], "/?token=other"));
        assert!(!admits(&[], "/"));
    }

    #[test]
    fn cookie_is_not_the_token_and_belongs_to_its_port() {
        let access = Access::with_token("secret");
        let admits = |host: &str, cookie: String| {
            let headers = [(header::HOST, host.to_owned()), (header::COOKIE, cookie)];
            let headers = headers
                .into_iter()
                .map(|(name, value)| (name, HeaderValue::from_str(&value).unwrap()))
                .collect();
            access.admits(&headers, &Uri::from_static("/"))
        };
        let kept = |port: u16| format!("a=b; rcomm_session_{port}={}", session("secret", port));
        assert!(admits("127.0.0.1:8765", kept(8765)));
        assert!(admits("n07", kept(0)));
        assert!(!admits("127.0.0.1:8766", kept(8765)));
        let renamed = format!("rcomm_session_8766={}", session("secret", 8765));
        assert!(!admits("127.0.0.1:8766", renamed));
        assert!(!admits(
            "127.0.0.1:8765",
            "rcomm_session_8765=secret".to_owned()
        ));
        assert!(!kept(8765).contains("secret"));
    }
}
