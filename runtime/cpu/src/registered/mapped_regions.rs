//! The regions that a group's ranks have mapped from each other, and how the ranks agree to use them.
//!
//! Every rank shows its offer; all ranks see the same offers and make the same decision. All ranks map a region that
//! the group has not used before, and show whether the mapping succeeded. So the ranks of a group always have the same
//! list of regions, and agree for each region on whether it can be used.

use super::access::{DirectAccess, MappedRegion, RegionBytes};
use super::exposed::Exposed;
use super::offer::Offer;
use super::region::{Region, RegionHandle};
use super::registry::Registry;
use super::terms::{AccessTerms, Phases};
use crate::wait::Failure;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The maximum number of known regions per rank. Beyond it, the least recently used regions are unmapped and
/// forgotten, and mapped again when they are used again.
const MAX_REGIONS: usize = 256;

/// The ranks' decision.
pub(crate) enum AccessOutcome<'a> {
    /// The ranks access each other's bytes, by the terms with this index.
    Agreed(usize, DirectAccess<'a>),
    /// The ranks use another algorithm.
    Declined(Exposed<'a>),
}

/// A region of a rank that all ranks know.
struct KnownRegion {
    /// The mapping, if the region is another rank's and is still mapped here.
    mapped: Option<Arc<MappedRegion>>,
    /// Whether all other ranks could map the region when it became known.
    is_mapped: bool,
    /// The value of `operations` when the region was last used.
    last_used: u64,
}

/// One rank's view of the regions that a group's ranks have mapped from each other.
pub(crate) struct MappedRegions {
    rank: usize,
    registry: Arc<Registry>,
    /// The known regions, by rank and then by the region's id.
    known: Vec<HashMap<u64, KnownRegion>>,
    /// Number of operations for which the ranks offered enough bytes.
    operations: u64,
}

impl MappedRegions {
    /// Makes the view of `rank` in a group of `size` ranks, with no known region.
    pub(crate) fn new(rank: usize, size: usize, registry: Arc<Registry>) -> Self {
        Self {
            rank,
            registry,
            known: std::iter::repeat_with(HashMap::new).take(size).collect(),
            operations: 0,
        }
    }

    /// The registry of the memory that this rank has allocated.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Unmaps all regions, since the group's ranks will agree on no access any more.
    pub(crate) fn unmap_all(&mut self) {
        self.known.iter_mut().for_each(HashMap::clear);
    }

    /// Agrees with the others on mutual access, by the first of these terms for which the ranks offer enough bytes.
    ///
    /// # Errors
    /// Those of the phases; `Io` if a region that was mapped before cannot be mapped again, or a rank offers
    /// more bytes than its region has.
    pub(crate) fn agree<'a>(
        &mut self,
        mut exposed: Exposed<'a>,
        terms: &[AccessTerms],
        phases: &mut impl Phases,
    ) -> Result<AccessOutcome<'a>, Failure> {
        let offer = exposed.open();
        if let Err(failure) = phases.show(&Offer::encode(offer.as_ref())) {
            if let Failure::Mismatch(..) = failure {
                // All ranks have seen that their signatures differ, so none accesses the bytes.
                exposed.close();
            }
            return Err(failure);
        }
        let offers: Vec<Option<Offer>> = (0..self.known.len())
            .map(|rank| Offer::decode(phases.shown(rank)))
            .collect();
        let decline = |mut exposed: Exposed<'a>| {
            exposed.close();
            Ok(AccessOutcome::Declined(exposed))
        };
        let Some((number, chosen)) = terms
            .iter()
            .enumerate()
            .find_map(|(number, terms)| Some((number, chosen(terms, &offers)?)))
        else {
            return decline(exposed);
        };
        self.operations += 1;
        let unknown = self.unknown(&chosen);
        if !unknown.is_empty() {
            let are_all_mapped = self.map(&unknown);
            phases.show(&[u8::from(are_all_mapped)])?;
            let are_mapped_by_all = (0..self.known.len()).all(|rank| phases.shown(rank)[0] == 1);
            self.remember(&unknown, are_mapped_by_all);
        }
        if !self.are_mapped(&chosen) {
            return decline(exposed);
        }
        let mapped = self.map_chosen(&chosen).map_err(Failure::Io)?;
        let access = DirectAccess::new(exposed, self.rank, &terms[number], mapped);
        Ok(AccessOutcome::Agreed(number, access))
    }

    /// Returns the chosen regions that are not known yet, with their ranks.
    fn unknown(&self, chosen: &[Option<ChosenBytes>]) -> Vec<(usize, RegionHandle)> {
        let regions = chosen.iter().enumerate();
        let regions = regions.filter_map(|(rank, bytes)| Some((rank, bytes.as_ref()?.region)));
        regions
            .filter(|(rank, region)| !self.known[*rank].contains_key(&region.id))
            .collect()
    }

    /// Adds these regions to the known ones, and maps those of other ranks; returns whether all could be mapped. Unmaps
    /// known regions that their owners have freed.
    fn map(&mut self, regions: &[(usize, RegionHandle)]) -> bool {
        for known in self.known.iter_mut().flat_map(HashMap::values_mut) {
            known.mapped.take_if(|mapped| mapped.region().is_empty());
        }
        let mut are_all_mapped = true;
        for (rank, region) in regions {
            let mapped = match *rank == self.rank {
                true => None,
                false => match Region::attach(region) {
                    Ok(mapped) => Some(Arc::new(MappedRegion::new(mapped))),
                    Err(error) => {
                        self.registry.note_unreachable(&error);
                        are_all_mapped = false;
                        None
                    }
                },
            };
            let known = KnownRegion {
                mapped,
                is_mapped: false,
                last_used: self.operations,
            };
            self.known[*rank].insert(region.id, known);
        }
        are_all_mapped
    }

    /// Records whether all ranks could map these regions, and forgets the least recently used beyond [`MAX_REGIONS`].
    fn remember(&mut self, regions: &[(usize, RegionHandle)], is_mapped: bool) {
        for (rank, region) in regions {
            let known = &mut self.known[*rank];
            if let Some(known) = known.get_mut(&region.id) {
                known.is_mapped = is_mapped;
                if !is_mapped {
                    known.mapped = None;
                }
            }
            while known.len() > MAX_REGIONS
                && let Some((&oldest, _)) = known
                    .iter()
                    .min_by_key(|(id, known)| (known.last_used, **id))
            {
                known.remove(&oldest);
            }
        }
    }

    /// Whether all ranks could map each of the chosen regions when it became known.
    fn are_mapped(&self, chosen: &[Option<ChosenBytes>]) -> bool {
        let mut regions = self.known.iter().zip(chosen);
        regions.all(|(known, chosen)| {
            let Some(chosen) = chosen else { return true };
            known
                .get(&chosen.region.id)
                .is_some_and(|known| known.is_mapped)
        })
    }

    /// Returns the chosen bytes of the other ranks, and maps their regions again if they were unmapped.
    fn map_chosen(
        &mut self,
        chosen: &[Option<ChosenBytes>],
    ) -> io::Result<Vec<Option<RegionBytes>>> {
        let mut ranks = Vec::with_capacity(chosen.len());
        for (rank, (known, chosen)) in self.known.iter_mut().zip(chosen).enumerate() {
            let mut found = None;
            if let Some(chosen) = chosen
                && let Some(known) = known.get_mut(&chosen.region.id)
            {
                known.last_used = self.operations;
                if rank != self.rank {
                    let mapped = match known.mapped.take() {
                        Some(mapped) => mapped,
                        None => Arc::new(MappedRegion::new(Region::attach(&chosen.region)?)),
                    };
                    known.mapped = Some(mapped.clone());
                    if chosen.bytes.end > mapped.region().len() {
                        let message = format!(
                            "rank {rank} of the group offers bytes up to byte {} of a region of {} bytes",
                            chosen.bytes.end,
                            mapped.region().len()
                        );
                        return Err(io::Error::other(message));
                    }
                    found = Some((mapped, chosen.bytes.clone()));
                }
            }
            ranks.push(found);
        }
        Ok(ranks)
    }
}

/// Bytes of a rank that the operation will use.
struct ChosenBytes {
    region: RegionHandle,
    bytes: Range<usize>,
}

/// Returns the bytes that the terms name; `None` unless all of them are offered.
fn chosen(terms: &AccessTerms, offers: &[Option<Offer>]) -> Option<Vec<Option<ChosenBytes>>> {
    let named = terms.needs.iter().zip(offers);
    let named = named.map(|(need, offer)| {
        let Some(need) = need else { return Some(None) };
        let offer = offer.as_ref()?;
        let bytes = offer.bytes(need.len)?;
        let region = offer.region;
        Some(Some(ChosenBytes { region, bytes }))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registered::terms::{Need, Rule};
    use crate::transport::shm::INLINE;
    use rcomm_core::Access;

    fn offer(id: u64, len: usize) -> Option<Offer> {
        let region = RegionHandle {
            pid: 1,
            number: 3,
            id,
            len,
        };
        Some(Offer { region, start: 0 })
    }

    #[test]
    fn bytes_are_chosen_if_every_rank_in_the_terms_offers_enough() {
        let need = Some(Need {
            len: 100,
            access: Access::Read,
        });
        let terms = AccessTerms {
            needs: vec![need, None, need],
            rule: Rule::Read,
        };
        assert!(chosen(&terms, &[offer(1, 100), None, offer(2, 200)]).is_some());
        assert!(chosen(&terms, &[offer(1, 100), offer(2, 200), None]).is_none());
        assert!(chosen(&terms, &[offer(1, 99), None, offer(2, 200)]).is_none());
    }

    /// The phases of two ranks: rank 0 is tested, and rank 1 shows `words` one after the other.
    struct Pair {
        words: Vec<[u8; INLINE]>,
        shown: [[u8; INLINE]; 2],
    }

    impl Phases for Pair {
        fn show(&mut self, bytes: &[u8]) -> Result<(), Failure> {
            self.shown = [word(bytes), self.words.remove(0)];
            Ok(())
        }

        fn shown(&self, rank: usize) -> &[u8; INLINE] {
            &self.shown[rank]
        }
    }

    fn word(bytes: &[u8]) -> [u8; INLINE] {
        let mut word = [0; INLINE];
        word[..bytes.len()].copy_from_slice(bytes);
        word
    }

    #[test]
    fn a_rank_that_offers_more_than_it_has_is_refused() {
        let registry = Arc::new(Registry::default());
        let other = Region::create(8192).unwrap();
        let region = other.handle();
        let valid = Offer { region, start: 0 };
        let len = 1 << 20;
        let too_large = Offer {
            region: RegionHandle { len, ..region },
            start: 8192,
        };
        let offered = |offer| word(&Offer::encode(Some(offer)));
        let mut pair = Pair {
            words: vec![offered(&valid), word(&[1]), offered(&too_large)],
            shown: [[0; INLINE]; 2],
        };
        let need = Some(Need {
            len: 4096,
            access: Access::Read,
        });
        let terms = [AccessTerms {
            needs: vec![None, need],
            rule: Rule::Read,
        }];
        let mut regions = MappedRegions::new(0, 2, registry.clone());
        let data = [0; 4096];
        let mut agree = || regions.agree(Exposed::read(&registry, &data), &terms, &mut pair);
        assert!(matches!(agree(), Ok(AccessOutcome::Agreed(0, _))));
        assert!(matches!(agree(), Err(Failure::Io(_))));
    }
}
