package simnode

// MIGModels returns the keys of the models that have MIG.
func MIGModels() (keys []string) {
	for _, m := range known().Models {
		if len(m.geometry().Profiles) > 0 {
			keys = append(keys, m.Key)
		}
	}
	return keys
}
