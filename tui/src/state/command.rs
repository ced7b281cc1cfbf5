//! Commands typed after `:`.

use super::screen::{Screen, VIEWS};
use crate::page::theme::ThemeName;
use crate::state::event::ExportFormat;
use clap::ValueEnum;
use rcomm_analyzer::Code;
use rcomm_recorder::model::Rank;
use std::path::PathBuf;
use std::sync::Arc;

/// Each command: its form, and its effect.
pub const COMMANDS: &[(&str, &str)] = &[
    ("overview, groups, ...", "go to a view by its name"),
    ("rank N", "go to a rank"),
    (
        "group NAME",
        "go to a group by its label, or a part of its name or description",
    ),
    ("why", "the causal chain of the whole hang"),
    ("stacks", "call stacks"),
    ("filter [EXPR]", "set the filter; without EXPR: clear it"),
    (
        "sort [COLUMN]",
        "sort the table by a column; without COLUMN: the default order",
    ),
    ("mark N", "mark or unmark a rank"),
    ("compare", "compare the marked ranks"),
    ("mute CODE", "mute or unmute a code of findings"),
    (
        "export text|json|perfetto [FILE]",
        "write the screen, the report or the timeline",
    ),
    ("save [FILE]", "write this screen as text"),
    (
        "dump [FOLDER]",
        "write every rank's record to a folder (--allow-actions)",
    ),
    ("job NAME", "show another job of this node"),
    ("pause, live", "pause or resume the display"),
    ("theme dark|light|contrast", "change the colors"),
    ("help", "help"),
    ("quit", "quit"),
];

/// A parsed command.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is explained by its line in COMMANDS")]
pub enum TypedCommand {
    Go(Screen),
    Group(String),
    Why,
    Filter(String),
    Sort(Option<String>),
    Mark(Rank),
    Mute(Code),
    Export(ExportFormat, PathBuf),
    Dump(PathBuf),
    Job(Arc<str>),
    Pause,
    Live,
    Theme(ThemeName),
    Quit,
}

/// The names that completion offers besides those of the views.
const NAMES: &[&str] = &[
    "rank", "group", "why", "stacks", "filter", "sort", "mark", "compare", "mute", "export",
    "save", "dump", "job", "pause", "live", "theme", "help", "quit",
];

/// Parses a command.
///
/// # Errors
///
/// A sentence that says what is wrong with `text`, with the expected form or where to find it.
pub fn parse(text: &str) -> Result<TypedCommand, String> {
    let text = text.trim();
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim();
    let rank = || {
        rest.parse::<Rank>()
            .map_err(|_| format!("`{name}` needs a rank, as in `:{name} 118`"))
    };
    if let Some((screen, _)) = VIEWS.iter().find(|(_, view)| *view == name) {
        return Ok(TypedCommand::Go(screen.clone()));
    }
    Ok(match name {
        "rank" => TypedCommand::Go(Screen::Rank(rank()?)),
        "group" if rest.is_empty() => return Err("`group` needs a name".into()),
        "group" => TypedCommand::Group(rest.into()),
        "why" => TypedCommand::Why,
        "stacks" => TypedCommand::Go(Screen::Stacks),
        "filter" => TypedCommand::Filter(rest.into()),
        "sort" => TypedCommand::Sort((!rest.is_empty()).then(|| rest.into())),
        "mark" => TypedCommand::Mark(rank()?),
        "compare" => TypedCommand::Go(Screen::Compare),
        "mute" => TypedCommand::Mute(Code::parse(rest).ok_or_else(|| {
            format!("`{rest}` is not a finding code; a code has an id, as E101, and a name, as not_joined: either is taken")
        })?),
        "save" => export(&format!("text {rest}"))?,
        "export" => export(rest)?,
        "dump" => TypedCommand::Dump(if rest.is_empty() { "rcomm-dumps" } else { rest }.into()),
        "job" if rest.is_empty() => return Err("`job` needs a name; `jobs` lists them".into()),
        "job" => TypedCommand::Job(rest.into()),
        "pause" => TypedCommand::Pause,
        "live" => TypedCommand::Live,
        "theme" => TypedCommand::Theme(
            ThemeName::from_str(rest, true)
                .map_err(|_| format!("`{rest}` is not a theme: dark, light or contrast"))?,
        ),
        "help" => TypedCommand::Go(Screen::Help),
        "q" | "quit" => TypedCommand::Quit,
        _ => return Err(format!("unknown command `{name}`; `help` lists them")),
    })
}

fn export(rest: &str) -> Result<TypedCommand, String> {
    let (format, path) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let found = ExportFormat::ALL
        .iter()
        .find(|(_, name, _)| *name == format);
    let &(format, _, default) =
        found.ok_or_else(|| format!("`{format}` is not a format: text, json or perfetto"))?;
    let path = path.trim();
    Ok(TypedCommand::Export(
        format,
        if path.is_empty() { default } else { path }.into(),
    ))
}

/// Names that the completion of commands and filters can offer.
#[derive(Clone, Debug, Default)]
pub struct KnownNames {
    /// Labels of groups.
    pub groups: Vec<String>,
    /// Host names.
    pub hosts: Vec<String>,
    /// Names of operations in flight.
    pub ops: Vec<String>,
    /// All codes of findings.
    pub codes: Vec<String>,
    /// Ranks that completion offers: root causes and marked ranks.
    pub ranks: Vec<String>,
    /// Column names of the focused table.
    pub columns: Vec<String>,
}

/// Returns the completions of `text`: whole command lines.
pub fn complete(text: &str, names: &KnownNames) -> Vec<String> {
    let Some((name, rest)) = text.split_once(char::is_whitespace) else {
        let views = VIEWS.iter().map(|(_, name)| *name);
        let names = NAMES.iter().copied().chain(views);
        let mut matching: Vec<String> = names
            .filter(|name| name.starts_with(text))
            .map(str::to_owned)
            .collect();
        matching.sort_unstable();
        return matching;
    };
    let words: Vec<String> = match name {
        "rank" | "mark" => names.ranks.clone(),
        "group" => names.groups.clone(),
        "mute" => names.codes.clone(),
        "sort" => names.columns.clone(),
        "export" => ExportFormat::ALL
            .iter()
            .map(|(_, name, _)| (*name).to_owned())
            .collect(),
        "theme" => ["dark", "light", "contrast"].map(str::to_owned).into(),
        _ => vec![],
    };
    let matching = words
        .iter()
        .filter(|word| word.starts_with(rest.trim_start()));
    matching.map(|word| format!("{name} {word}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_commands_are_parsed_and_errors_name_the_expected_form() {
        assert_eq!(parse("rank 118"), Ok(TypedCommand::Go(Screen::Rank(118))));
        assert_eq!(parse(" inflight "), Ok(TypedCommand::Go(Screen::InFlight)));
        assert_eq!(parse("mute not_joined"), Ok(TypedCommand::Mute(Code::E101)));
        let path = PathBuf::from("a b.json");
        assert_eq!(
            parse("export json a b.json"),
            Ok(TypedCommand::Export(ExportFormat::Json, path))
        );
        assert_eq!(parse("sort"), Ok(TypedCommand::Sort(None)));
        for (text, part) in [
            ("rank x", ":rank 118"),
            ("mute X9", "E101"),
            ("export pdf", "perfetto"),
            ("theme pink", "contrast"),
            ("fly", "unknown command"),
            ("", "unknown command"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn every_name_that_completion_offers_is_a_command() {
        for name in complete("", &KnownNames::default()) {
            let unknown = matches!(parse(&name), Err(e) if e.contains("unknown command"));
            assert!(!unknown, "{name}");
        }
    }

    #[test]
    fn arguments_complete_from_names_in_the_job() {
        let names = KnownNames {
            groups: vec!["dp_0".into(), "tp_0".into()],
            ..KnownNames::default()
        };
        assert_eq!(complete("group d", &names), ["group dp_0"]);
        assert_eq!(complete("gro", &names), ["group", "groups"]);
    }
}
