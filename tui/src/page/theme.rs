//! Colors by meaning, and their mapping to a terminal.
//!
//! Views use [`Tone`]s. No meaning is carried by color alone: the text or a glyph says it too.

use ratatui::style::{Color, Modifier, Style};
use serde::{Deserialize, Serialize};

/// The meaning of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tone {
    /// No particular meaning.
    #[default]
    Plain,
    /// Less important.
    Dim,
    /// A title or a column's heading.
    Title,
    /// A key, or something to be acted on.
    Accent,
    /// In good state.
    Good,
    /// Waiting for others.
    Waiting,
    /// The cause of a problem, or an error.
    Bad,
    /// Late, or a warning.
    Late,
    /// A doubt about a finding; a line of the head that begins with it is wrapped to as many rows as it needs.
    Doubt,
    /// Unknown: silent, lost, or never read.
    Silent,
}

/// How many colors the theme uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Depth {
    /// No colors: bold, dim, italic and reverse only.
    None,
    /// The sixteen of the terminal's own palette.
    #[value(name = "16")]
    #[serde(rename = "16")]
    Ansi,
    /// The 256 of xterm.
    #[value(name = "256")]
    #[serde(rename = "256")]
    Indexed,
    /// 24 bits.
    True,
}

impl Depth {
    /// The color depth that a terminal's environment indicates.
    ///
    /// `no_color`, `colorterm` and `term` are the values of `NO_COLOR`, `COLORTERM` and `TERM`.
    pub fn detect(no_color: Option<&str>, colorterm: Option<&str>, term: Option<&str>) -> Self {
        let term = term.unwrap_or("");
        if no_color.is_some_and(|value| !value.is_empty()) || term == "dumb" {
            Self::None
        } else if matches!(colorterm, Some("truecolor" | "24bit")) {
            Self::True
        } else if term.contains("256color") || term.contains("direct") {
            Self::Indexed
        } else {
            Self::Ansi
        }
    }
}

/// The name of a set of colors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ThemeName {
    /// For dark backgrounds; distinguishable for the color-blind (after Okabe and Ito's palette).
    #[default]
    Dark,
    /// For light backgrounds, with the same hues. With 16 colors or none it is the same as `dark`.
    Light,
    /// Saturated colors, for dark backgrounds.
    Contrast,
}

/// A theme at a color depth: maps tones to styles.
#[derive(Clone, Copy, Debug)]
pub struct Theme {
    name: ThemeName,
    depth: Depth,
}

type Rgb = (u8, u8, u8);

impl Theme {
    /// Creates a theme for this color depth.
    pub fn new(name: ThemeName, depth: Depth) -> Self {
        Self { name, depth }
    }

    /// The color depth.
    pub fn depth(&self) -> Depth {
        self.depth
    }

    /// The style of a tone.
    pub fn style(&self, tone: Tone) -> Style {
        let style = match tone {
            Tone::Title | Tone::Bad => Style::new().add_modifier(Modifier::BOLD),
            Tone::Dim => Style::new().add_modifier(Modifier::DIM),
            Tone::Silent if self.depth == Depth::None => {
                Style::new().add_modifier(Modifier::ITALIC)
            }
            _ => Style::new(),
        };
        let Some((rgb, ansi)) = self.color(tone) else {
            return style;
        };
        match self.depth {
            Depth::None => style,
            Depth::Ansi => style.fg(ansi),
            Depth::Indexed => style.fg(Color::Indexed(nearest_index(rgb))),
            Depth::True => style.fg(Color::Rgb(rgb.0, rgb.1, rgb.2)),
        }
    }

    /// The style of a selected row, applied on top of the styles of its cells.
    pub fn selected(&self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// The style of a selected row of this tone, which replaces the styles of its cells.
    pub fn selected_row(&self, tone: Tone) -> Style {
        Style::new()
            .fg(self.style(tone).fg.unwrap_or(Color::Reset))
            .remove_modifier(Modifier::DIM)
            .add_modifier(Modifier::REVERSED)
    }

    fn color(&self, tone: Tone) -> Option<(Rgb, Color)> {
        let (dark, light, ansi): (Rgb, Rgb, Color) = match tone {
            Tone::Plain | Tone::Dim | Tone::Title => return None,
            Tone::Accent => ((86, 180, 233), (0, 64, 128), Color::Cyan),
            Tone::Good => ((0, 158, 115), (0, 128, 92), Color::Green),
            Tone::Waiting => ((86, 180, 233), (0, 114, 178), Color::Blue),
            Tone::Bad => ((240, 100, 40), (180, 60, 0), Color::Red),
            Tone::Late | Tone::Doubt => ((230, 159, 0), (150, 95, 0), Color::Yellow),
            Tone::Silent => ((204, 121, 167), (150, 60, 110), Color::Magenta),
        };
        Some(match self.name {
            ThemeName::Dark => (dark, ansi),
            ThemeName::Light => (light, ansi),
            ThemeName::Contrast => {
                // Each component is off or at its maximum. The limit makes `Bad` red and `Late` yellow.
                let strong = |c: u8| if c > 110 { 255 } else { 0 };
                (
                    (strong(dark.0), strong(dark.1), strong(dark.2)),
                    bright(ansi),
                )
            }
        })
    }
}

fn bright(color: Color) -> Color {
    match color {
        Color::Cyan => Color::LightCyan,
        Color::Green => Color::LightGreen,
        Color::Blue => Color::LightBlue,
        Color::Red => Color::LightRed,
        Color::Yellow => Color::LightYellow,
        Color::Magenta => Color::LightMagenta,
        other => other,
    }
}

/// The nearest of xterm's 6 × 6 × 6 colors, which follow the 16 of the palette.
fn nearest_index((r, g, b): Rgb) -> u8 {
    let level = |c: u8| -> u8 {
        // Levels are 0, 95, 135, 175, 215, 255.
        match c {
            0..=47 => 0,
            48..=114 => 1,
            _ => (c - 35) / 40,
        }
    };
    16 + 36 * level(r) + 6 * level(g) + level(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_environment_chooses_the_depth() {
        let depth = Depth::detect;
        assert_eq!(
            depth(Some("1"), Some("truecolor"), Some("xterm")),
            Depth::None
        );
        assert_eq!(
            depth(Some(""), Some("truecolor"), Some("xterm")),
            Depth::True
        );
        assert_eq!(depth(None, None, Some("tmux-256color")), Depth::Indexed);
        assert_eq!(depth(None, None, Some("xterm")), Depth::Ansi);
        assert_eq!(depth(None, None, Some("dumb")), Depth::None);
    }

    #[test]
    fn without_colors_no_tone_has_a_foreground_color() {
        let theme = Theme::new(ThemeName::Dark, Depth::None);
        let tones = [
            Tone::Plain,
            Tone::Dim,
            Tone::Title,
            Tone::Accent,
            Tone::Good,
            Tone::Waiting,
            Tone::Bad,
            Tone::Late,
            Tone::Doubt,
            Tone::Silent,
        ];
        for tone in tones {
            assert_eq!(theme.style(tone).fg, None, "{tone:?}");
        }
    }

    #[test]
    fn good_bad_late_and_silent_differ_in_every_theme_with_colors() {
        for name in [ThemeName::Dark, ThemeName::Light, ThemeName::Contrast] {
            for depth in [Depth::Ansi, Depth::Indexed, Depth::True] {
                let theme = Theme::new(name, depth);
                let tones = [Tone::Good, Tone::Bad, Tone::Late, Tone::Silent, Tone::Plain];
                let colors: HashSet<_> = tones.iter().map(|&t| theme.style(t).fg).collect();
                assert_eq!(colors.len(), tones.len(), "{name:?} {depth:?}");
            }
        }
    }

    /// The relative luminance of a color, 0..1.
    fn luminance((r, g, b): Rgb) -> f64 {
        let linear = |c: u8| match f64::from(c) / 255.0 {
            low if low <= 0.040_45 => low / 12.92,
            high => ((high + 0.055) / 1.055).powf(2.4),
        };
        0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
    }

    fn contrast(one: Rgb, other: Rgb) -> f64 {
        let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
        one.max(other) / one.min(other)
    }

    #[test]
    fn text_can_be_read_on_white_and_the_bars_of_two_kinds_differ_in_brightness() {
        let theme = Theme::new(ThemeName::Light, Depth::True);
        let color = |tone| theme.color(tone).expect("the tone has a color").0;
        for tone in [
            Tone::Accent,
            Tone::Good,
            Tone::Waiting,
            Tone::Bad,
            Tone::Late,
            Tone::Silent,
        ] {
            let ratio = contrast(color(tone), (255, 255, 255));
            assert!(ratio >= 4.5, "{tone:?}: {ratio}");
        }
        let ratio = contrast(color(Tone::Good), color(Tone::Accent));
        assert!(ratio >= 2.0, "{ratio}");
    }

    #[test]
    fn a_color_maps_to_the_nearest_indexed_one() {
        assert_eq!(nearest_index((0, 0, 0)), 16);
        assert_eq!(nearest_index((255, 255, 255)), 231);
        assert_eq!(nearest_index((95, 135, 175)), 67);
    }
}
