//! Writes the two text formats of Prometheus, and negotiates between them.
//!
//! The formats differ in the name on a counter's HELP and TYPE lines (OpenMetrics leaves out `_total`), and in
//! exemplars and the closing `# EOF`, which only OpenMetrics has. Source: the OpenMetrics 1.0 specification;
//! "Exposition formats" in Prometheus' documentation; RFC 9110, section 12.5.1.

use super::list::{Kind, Metric};
use std::fmt::Write as _;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Form {
    /// The format that an `Accept` header prefers; text on a tie or if neither is listed.
    pub fn preferred_by(accept: &str) -> Self {
        let (mut open, mut text) = (0.0f32, 0.0f32);
        for offer in accept.split(',') {
            let mut parts = offer.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let (mut weight, mut version) = (1.0f32, "");
            for part in parts {
                match part.split_once('=') {
                    Some(("q", value)) => weight = value.parse().unwrap_or(0.0),
                    Some(("version", value)) => version = value,
                    _ => {}
                }
            }
            match kind {
                "application/openmetrics-text" if matches!(version, "" | "1.0.0") => {
                    open = weight.max(open);
                }
                "text/plain" if matches!(version, "" | "0.0.4") => text = weight.max(text),
                "text/*" | "*/*" => text = weight.max(text),
                _ => {}
            }
        }
        if open > text {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// The `Content-Type` to answer with.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The last line of an OpenMetrics text.
const END: &str = "# EOF\n";

/// One collective as an example of the values in a bucket: the id of its trace, its value, and when it ended, in
/// seconds since the epoch.
pub(crate) struct Exemplar {
    pub(crate) trace_id: String,
    pub(crate) value: f64,
    pub(crate) at_s: f64,
}

/// A metrics text under construction. [`Writer::family`] begins a family; its samples follow.
pub(crate) struct Writer {
    form: Form,
    out: String,
}

impl Writer {
    pub(crate) fn new(form: Form) -> Self {
        Self {
            form,
            out: String::with_capacity(16 * 1024),
        }
    }

    /// Creates a writer that continues a text that another writer of the same format finished.
    pub(crate) fn after(form: Form, mut text: String) -> Self {
        if text.ends_with(END) {
            text.truncate(text.len() - END.len());
        }
        Self { form, out: text }
    }

    /// The text, with the closing line of its format.
    pub(crate) fn finish(mut self) -> String {
        if self.form == Form::OpenMetrics {
            self.out.push_str(END);
        }
        self.out
    }

    /// Writes the lines `HELP` and `TYPE` of a metric; the caller then writes its samples.
    pub(crate) fn family(&mut self, metric: &Metric) {
        let Metric { name, help, .. } = metric;
        let (suffix, kind) = match (metric.kind, self.form) {
            (Kind::Gauge, _) => ("", "gauge"),
            (Kind::Histogram, _) => ("", "histogram"),
            (Kind::Counter, Form::OpenMetrics) => ("", "counter"),
            (Kind::Counter, Form::Text) => ("_total", "counter"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.out,
            "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}"
        );
    }

    /// Writes a sample of the current family. `name` has the suffix that the type of the metric requires.
    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.name(name, labels);
        let _ = writeln!(self.out, " {value}");
    }

    /// Writes a bucket of a histogram, with its exemplar if the format supports it.
    pub(crate) fn bucket(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        count: u64,
        exemplar: Option<Exemplar>,
    ) {
        self.name(name, labels);
        let _ = write!(self.out, " {count}");
        if let Some(exemplar) = exemplar.filter(|_| self.form == Form::OpenMetrics) {
            let Exemplar {
                trace_id,
                value,
                at_s,
            } = exemplar;
            let _ = write!(self.out, " # {{trace_id=\"{trace_id}\"}} {value} {at_s:.3}");
        }
        self.out.push('\n');
    }

    /// Writes a gauge that has one sample without labels.
    pub(crate) fn gauge(&mut self, metric: &Metric, value: f64) {
        self.family(metric);
        self.sample(metric.name, &[], value);
    }

    /// Writes a counter that has one sample without labels.
    pub(crate) fn counter(&mut self, metric: &Metric, value: u64) {
        self.family(metric);
        self.sample(&format!("{}_total", metric.name), &[], value as f64);
    }

    /// Writes a sample's name and its labels, whose values are escaped.
    fn name(&mut self, name: &str, labels: &[(&str, &str)]) {
        self.out.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            self.out.push(if i == 0 { '{' } else { ',' });
            let _ = write!(self.out, "{label}=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.out.push_str("\\\\"),
                    '"' => self.out.push_str("\\\""),
                    '\n' => self.out.push_str("\\n"),
                    c => self.out.push(c),
                }
            }
            self.out.push('"');
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_the_greatest_weight_is_chosen() {
        let prometheus = "application/openmetrics-text;version=1.0.0,\
                          application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, form) in [
            (prometheus, Form::OpenMetrics),
            ("", Form::Text),
            ("*/*", Form::Text),
            ("text/html", Form::Text),
            (
                "application/openmetrics-text; q=0.2, text/plain",
                Form::Text,
            ),
            ("application/openmetrics-text; version=9.0.0", Form::Text),
            ("application/openmetrics-text; q=bad, */*", Form::Text),
            (
                "text/plain; q=0.1, application/openmetrics-text; q=0.2",
                Form::OpenMetrics,
            ),
        ] {
            assert_eq!(Form::preferred_by(accept), form, "{accept}");
        }
    }

    #[test]
    fn labels_are_escaped_and_only_open_metrics_has_exemplars() {
        for form in [Form::Text, Form::OpenMetrics] {
            let mut writer = Writer::new(form);
            let metric = Metric {
                name: "rcomm_x",
                kind: Kind::Counter,
                help: "Of x.",
                otlp: None,
            };
            writer.counter(&metric, 3);
            let exemplar = Exemplar {
                trace_id: "ab".into(),
                value: 0.5,
                at_s: 2.0,
            };
            writer.bucket("h_bucket", &[("le", "1\"\\\n")], 7, Some(exemplar));
            let text = writer.finish();
            let plain = "# HELP rcomm_x_total Of x.\n# TYPE rcomm_x_total counter\nrcomm_x_total 3\n\
                         h_bucket{le=\"1\\\"\\\\\\n\"} 7\n";
            let open = "# HELP rcomm_x Of x.\n# TYPE rcomm_x counter\nrcomm_x_total 3\n\
                        h_bucket{le=\"1\\\"\\\\\\n\"} 7 # {trace_id=\"ab\"} 0.5 2.000\n# EOF\n";
            assert_eq!(text, if form == Form::Text { plain } else { open });
        }
    }
}
