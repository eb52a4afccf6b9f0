package configs

import "strings"

// candidatesTried is the number of candidates beyond which none is suggested.
const candidatesTried = 100

// nearest returns the candidate that s is most likely a misspelling of; "" if
// none is near. Of equally near ones it is the first.
func nearest(s string, candidates []string) string {
	best, limit := "", len(s)/3+1
	// The distance takes quadratic time, and a document can have many keys.
	if len(s) > valueShown || len(candidates) > candidatesTried {
		return ""
	}
	for _, candidate := range candidates {
		d := distance(strings.ToLower(s), strings.ToLower(candidate))
		if d <= limit && (best == "" || d < limit) {
			best, limit = candidate, d
		}
	}
	return best
}

// distance is the number of bytes to insert, delete or replace to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
