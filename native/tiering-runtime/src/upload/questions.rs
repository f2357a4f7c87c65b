//! Questions to the shell: one of each kind at a time.
//!
//! Owns which question an answer belongs to. The machine asks again when an answer does not come in time, but the shell's
//! answers do not say what they answer: so the second question is held until the first is answered after all, or so long ago
//! that its answer cannot come any more. Taking a late answer for another question's could make a root durable that is not.

use super::UploadPush;

/// No call to the metadata store lives as long as this.
const ANSWER_LOST_AFTER_MS: u64 = 120_000;

/// The questions of one kind.
#[derive(Debug, Default)]
pub(super) struct Question {
    asked: Option<Asked>,
    held: Option<(u64, UploadPush)>,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    generation: u64,
    at_ms: u64,
}

impl Question {
    /// Asks, or holds the question back; the answer says what to push now.
    pub(super) fn ask(
        &mut self,
        now_ms: u64,
        generation: u64,
        push: UploadPush,
    ) -> Option<UploadPush> {
        self.held = Some((generation, push));
        self.release(now_ms)
    }

    /// Which question was answered (`None` if none was asked), and what to push now.
    pub(super) fn answered(&mut self, now_ms: u64) -> (Option<u64>, Option<UploadPush>) {
        let generation = self.asked.take().map(|asked| asked.generation);
        (generation, self.release(now_ms))
    }

    /// What to push now because the answer before it is given up.
    pub(super) fn release(&mut self, now_ms: u64) -> Option<UploadPush> {
        if self
            .asked
            .is_some_and(|asked| now_ms < asked.at_ms.saturating_add(ANSWER_LOST_AFTER_MS))
        {
            return None;
        }
        let (generation, push) = self.held.take()?;
        self.asked = Some(Asked {
            generation,
            at_ms: now_ms,
        });
        Some(push)
    }

    /// When to look again, if a question is held.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let asked = self.asked.filter(|_| self.held.is_some())?;
        Some(asked.at_ms.saturating_add(ANSWER_LOST_AFTER_MS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_taken_for_the_next_question_s() {
        let mut question = Question::default();
        assert_eq!(
            question.ask(0, 1, UploadPush::ReadPointer),
            Some(UploadPush::ReadPointer)
        );
        assert_eq!(
            question.ask(35_000, 2, UploadPush::ReadPointer),
            None,
            "held"
        );
        assert_eq!(
            question.answered(40_000),
            (Some(1), Some(UploadPush::ReadPointer)),
            "the second is asked now"
        );
        assert_eq!(question.answered(40_001), (Some(2), None));
        assert_eq!(question.answered(40_002), (None, None), "nobody asked");
    }

    #[test]
    fn an_answer_that_never_comes_is_given_up() {
        let mut question = Question::default();
        assert_eq!(
            question.ask(0, 1, UploadPush::WriteAnchor),
            Some(UploadPush::WriteAnchor)
        );
        assert_eq!(question.poll_timeout(), None, "nothing is held");
        assert_eq!(question.ask(35_000, 2, UploadPush::WriteAnchor), None);
        assert_eq!(question.poll_timeout(), Some(ANSWER_LOST_AFTER_MS));
        assert_eq!(
            question.release(ANSWER_LOST_AFTER_MS),
            Some(UploadPush::WriteAnchor)
        );
        assert_eq!(question.answered(ANSWER_LOST_AFTER_MS + 1), (Some(2), None));
    }
}
