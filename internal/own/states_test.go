package own

import "testing"

// Every state is reached by steps of the table, every step that is no panic is
// taken in one of them, and each keeps the cell's own rules.
func TestStatesOfACell(t *testing.T) {
	reached := map[State]bool{Absent: true}
	for again := true; again; {
		again = false
		for s := range reached {
			for _, step := range Table[s] {
				if !step.Panic && !reached[step.Next] {
					reached[step.Next], again = true, true
				}
			}
		}
	}
	for s := Absent; s < NumStates; s++ {
		t.Run("cell/"+s.String(), func(t *testing.T) {
			if !reached[s] {
				t.Error("no steps lead here")
			}
			for a := Open; a < NumActions; a++ {
				step := Table[s][a]
				switch {
				case step.Panic && step != Step{Panic: true}:
					t.Errorf("%v panics, and does something besides", a)
				case step.Panic && (a == Ask || a == Borrow || a == Take || a == Close):
					t.Errorf("%v panics: a program can get here", a)
				case step.Err != nil && (step.Next != s || step.Borrows != 0 || step.Release):
					t.Errorf("%v fails, and changes something: %+v", a, step)
				case step.Release && step.Next != Closed:
					t.Errorf("%v releases what is %v then", a, step.Next)
				case step.Next == Closed && s != Closed && !step.Release:
					t.Errorf("%v closes, and nobody releases", a)
				case a == Ask && (step.Next != s || step.Borrows != 0):
					t.Errorf("asking changes something: %+v", step)
				}
			}
		})
	}
}
