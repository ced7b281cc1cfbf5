//! The configuration file: `$XDG_CONFIG_HOME/rcomm/top.toml`.

use crate::page::theme::{Depth, ThemeName};
use crate::state::screens::OverviewPane;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Settings of the file. Every setting has a default; an unknown key is an error.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Interval between two reads of a source: `1s`, `500ms`.
    pub refresh: Option<String>,
    /// The color theme; chosen by the terminal's background if absent.
    pub theme: Option<ThemeName>,
    /// Color depth; detected from the terminal if absent.
    pub colours: Option<Depth>,
    /// Draw with ASCII characters only.
    pub ascii: Option<bool>,
    /// Whether the wheel scrolls and clicks select; on if absent.
    pub mouse: Option<bool>,
    /// Memory for the snapshots that are kept, MiB; if absent, it depends on the number of ranks.
    pub history_mib: Option<usize>,
    /// Age from which a pending operation is overdue; half of its own time-out if that is shorter.
    pub overdue: Option<String>,
    /// Duration without an answer after which a rank counts as silent: `5s`.
    pub silent_after: Option<String>,
    /// Keys by name of the action.
    pub keys: BTreeMap<String, Vec<String>>,
    /// Settings of findings, by code.
    pub warnings: BTreeMap<String, FindingSettings>,
    /// Columns of tables, by the name of their pane.
    pub columns: BTreeMap<String, Vec<String>>,
    /// Layout of the screens.
    pub layout: LayoutConfig,
    /// Whether actions that write are permitted.
    pub actions: Actions,
}

/// Settings of the findings with one code.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FindingSettings {
    /// Whether findings with the code are shown; if not, the code is muted at start.
    pub enabled: bool,
    /// Threshold of codes that have one: for W220 a share of the job's time, from 0 to 1.
    pub threshold: Option<f64>,
}

/// Layout of the screens.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayoutConfig {
    /// Panes of the first screen, from top to bottom; if empty, the default ones, which depend on the job and on the
    /// size of the terminal.
    pub overview: Vec<OverviewPane>,
}

impl Default for FindingSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            threshold: None,
        }
    }
}

/// Whether actions that write are permitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Actions {
    /// Allow saving the records of all ranks, and asking ranks for their dumps.
    pub allow: bool,
}

/// The first part of the file that `gen-config` prints: the settings before the keys, commented out, each with its
/// default or an example.
pub const DEFAULTS: &str = r#"# rcomm-top: $XDG_CONFIG_HOME/rcomm/top.toml
# Every setting, commented out, with its default or an example. Options of the command line and
# RCOMM_TOP_* win over this file.

# Interval between two reads of a source.
#refresh = "1s"
# dark, light or contrast. Default: light if the terminal has a light background, else dark.
#theme = "dark"
# none, 16, 256 or true. Default: what the terminal supports; NO_COLOR is honored.
#colours = "256"
# Draw with ASCII characters only.
#ascii = false
# The wheel scrolls, clicks select and open. Hold shift to select text, or turn it off.
#mouse = true
# Memory for the snapshots that are kept, MiB. Default: one for each rank, at least 16 and at most 64.
#history_mib = 64
# Age from which a pending operation is overdue; half of its own time-out if that is shorter.
#overdue = "5s"
# Time without an answer after which a rank counts as silent.
#silent_after = "5s"

# Keys of each action. A sequence of two keys is written "g g".
[keys]
"#;

/// The part of the file that follows the keys, up to `[actions]`.
const TABLES: &str = r#"
# Findings can be muted by code; W220 has a threshold as well.
#[warnings.W240]
#enabled = false
#[warnings.W220]
# Share of the job's time that the other ranks spend waiting for a rank.
#threshold = 0.02

# Columns of tables, by the title of their pane (spaces as underscores), in the order wanted.
[columns]
#groups = ["group", "ranks", "seq last/min", "in flight", "oldest"]
#in_flight = ["age", "group", "seq", "op", "joined", "state"]

[layout]
# Panes of the first screen from top to bottom: warnings, why, look, trends, groups, in_flight, timeline,
# operations, ranks.
# Default: depends on the job and on the size of the terminal.
#overview = ["warnings", "groups", "ranks"]
"#;

/// Returns the whole file that `gen-config` prints: every setting, commented out, with its default or an example.
pub fn generated() -> String {
    let mut text = DEFAULTS.to_owned();
    for binding in crate::keys::BINDINGS {
        let keys: Vec<String> = binding.keys.iter().map(|key| format!("{key:?}")).collect();
        text.push_str(&format!("# {}\n", binding.help));
        text.push_str(&format!("#{} = [{}]\n", binding.name, keys.join(", ")));
    }
    text.push_str(TABLES);
    text.push_str(
        "\n[actions]\n# Allow actions that write: save the records of all ranks to a folder, ask ranks for dumps.\n",
    );
    text.push_str("#allow = false\n");
    text
}

/// Path of the file, given `XDG_CONFIG_HOME` and `HOME`; `None` if neither is set. An empty `XDG_CONFIG_HOME` counts as
/// not set.
pub fn default_path(xdg: Option<&str>, home: Option<&str>) -> Option<PathBuf> {
    let base = match xdg.filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => Path::new(home?).join(".config"),
    };
    Some(base.join("rcomm").join("top.toml"))
}

impl Config {
    /// Parses the text of a configuration file.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong in the file, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Keymap;

    #[test]
    fn the_generated_file_gives_the_defaults_and_its_commented_settings_are_valid() {
        let text = generated();
        assert_eq!(Config::parse(&text), Ok(Config::default()));
        // A comment without a space after the `#` is a setting.
        let active: String = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let config = Config::parse(&active).expect("every setting is known");
        assert_eq!(config.refresh.as_deref(), Some("1s"));
        assert_eq!(config.keys.len(), crate::keys::BINDINGS.len());
        assert!(Keymap::with(&config.keys).is_ok());
        assert_eq!(config.warnings["W220"].threshold, Some(0.02));
        assert_eq!(config.columns["groups"][0], "group");
        assert_eq!(config.layout.overview.len(), 3);
        assert!(Config::parse("layout.overview = [\"moon\"]").is_err());
    }

    #[test]
    fn an_error_names_the_unknown_key() {
        let error = Config::parse("refrehs = \"1s\"").expect_err("the key is misspelled");
        assert!(error.contains("refrehs"), "{error}");
    }

    #[test]
    fn the_path_is_below_xdg_config_home_or_else_below_home() {
        let path = default_path(Some("/c"), Some("/h")).expect("a directory is given");
        assert_eq!(path, Path::new("/c/rcomm/top.toml"));
        let path = default_path(None, Some("/h")).expect("a directory is given");
        assert_eq!(path, Path::new("/h/.config/rcomm/top.toml"));
        assert_eq!(default_path(None, None), None);
    }
}
